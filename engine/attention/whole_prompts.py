"""Whole prompts by torch's own ragged attention (`torch.nn.attention.varlen`), beside a backend that reads pages.

Nothing of a whole prompt was computed before, so that all its keys and values are among the step's own and lie side
by side: what FlashAttention-2 needs, which torch brings along. (What reads pages comes with other packages.)
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionSpec, StepLayout, StepTensors
from engine.attention.varlen import installed, unfit_for_paged_varlen

VARLEN = "torch.nn.attention.varlen"
FIRST = (8, 0)  # compute capability of the first GPUs that FlashAttention-2 runs on


class TorchPrompts:
    """Attends to whole prompts of a model. `why_not_torch_prompts` says whether it can."""

    def __init__(self, spec: AttentionSpec) -> None:
        module = importlib.import_module(VARLEN)
        self._attention: Callable[..., Any] = module.varlen_attn
        self._into: Callable[..., Any] | None = getattr(module, "varlen_attn_out", None)
        self._settings: dict[str, Any] = {"scale": spec.scale}
        if spec.group > 1:
            self._settings["enable_gqa"] = True

    def find(self, step: StepTensors) -> WholePrompts | None:
        """Return the whole prompts that one call can take: of those that lie side by side those with most tokens."""
        found = _most_tokens(step.layout)
        if found is None:
            return None
        row, beyond = found
        tokens = step.layout.query_start_loc[row : beyond + 1]
        first = int(tokens[0])
        starts = step.query_start_loc[row : beyond + 1]
        starts = starts - first if first else starts
        return WholePrompts(self, row, beyond, slice(first, int(tokens[-1])), starts, int(np.diff(tokens).max()))

    def attend(
        self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, window: int
    ) -> None:
        """Write the causal attention of ragged queries to `out`, [num_tokens, heads, head_dim].

        starts, longest: see `WholePrompts`. window: see `PagedAttention.forward`.
        """
        seen = (window - 1, 0) if 0 < window < longest else (-1, 0)
        ragged = (query, key, value, starts, starts, longest, longest)
        if self._into is not None:
            self._into(out, *ragged, window_size=seen, **self._settings)
        else:
            out.copy_(self._attention(*ragged, window_size=seen, **self._settings))


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """Rows [row, beyond_row) of a step, which are whole prompts, and `tokens`, theirs among the step's.

    starts: where each begins among those tokens, and where the last ends, int32 on the device. longest: tokens of
    the longest.
    """

    by: TorchPrompts
    row: int
    beyond_row: int
    tokens: slice
    starts: Tensor
    longest: int

    def attend(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, window: int) -> None:
        """Write the prompts' part of `out`; all of the step's tokens, as in `PagedAttention.forward`."""
        out, query, key, value = (each[self.tokens] for each in (out, query, key, value))
        self.by.attend(out, query, key, value, self.starts, self.longest, window)


def why_not_torch_prompts(spec: AttentionSpec) -> str | None:
    """Return why torch's ragged attention cannot take whole prompts of this model here, None when it can."""
    reason = unfit_for_paged_varlen(spec)
    if reason is not None:
        return reason
    needs = {"softcap": spec.softcap, "attention sinks": spec.sinks, "latent cache": spec.latent}
    lacking = [what for what, needed in needs.items() if needed]
    if lacking:
        return f"it has no {lacking[0]}, which this model needs"
    if not installed(VARLEN):
        return f"torch {torch.__version__} has no ragged attention"
    asked = {"scale", "window_size"} | ({"enable_gqa"} if spec.group > 1 else set())
    missing = asked - inspect.signature(importlib.import_module(VARLEN).varlen_attn).parameters.keys()
    if missing:
        return f"that of torch {torch.__version__} has no {' and no '.join(sorted(missing))}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without FlashAttention"
    found = torch.cuda.get_device_capability(spec.device)
    return None if found >= FIRST else f"it is for GPUs from capability 8.0, this one has {found[0]}.{found[1]}"


def _most_tokens(layout: StepLayout) -> tuple[int, int] | None:
    starts = layout.query_start_loc
    whole = (layout.num_computed_tokens == 0) & (np.diff(starts) > 1)
    if not whole.any():
        return None
    edges = np.flatnonzero(np.diff(whole, prepend=False, append=False)).reshape(-1, 2)
    row, beyond = edges[np.argmax(starts[edges[:, 1]] - starts[edges[:, 0]])]
    return int(row), int(beyond)
