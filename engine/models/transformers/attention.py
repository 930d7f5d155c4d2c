"""Attention as transformers' models call it, over our paged cache; see transformers' `AttentionInterface`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.attention.base import AttentionContext, MergedHeads
from engine.errors import CheckpointError
from engine.kernels.base import Kernels
from engine.layers.attention import CachedAttention
from engine.layers.base import Build

NAME = "squadron_paged"
_PLACE = "_squadron_paged"  # attribute of transformers' attention modules: their layer and the step
REFUSED = ("position_bias", "attention_bias", "head_mask", "indices", "block_mask")


class Step:
    """The step that is being computed: set before the layers run, read by each call of attention."""

    def __init__(self) -> None:
        self.context: AttentionContext | None = None
        self._rotations: list[tuple[Tensor, Any]] = []

    @contextmanager
    def runs(self, context: AttentionContext) -> Iterator[None]:
        """Have the layers attend by `context` meanwhile."""
        self.context = context
        try:
            yield
        finally:
            self.context = None
            self._rotations.clear()

    def rotation(self, cos: Tensor, sin: Tensor, kernels: Kernels) -> Any:
        """Return what `kernels.norm_rotate` takes of cosines and sines [1, num_tokens, head_dim], None if it cannot.

        They are read once in a step: its layers are handed the same tensors.
        """
        for known, rotation in self._rotations:
            if known is cos:
                return rotation
        angles = torch.stack((cos[0], sin[0]), dim=1)
        first, second = angles.chunk(2, dim=-1)
        # Our kernels turn both features of a pair by one angle. Some models have one for each.
        rotation = kernels.rotation(first.float().contiguous()) if torch.equal(first, second) else None
        self._rotations.append((cos, rotation))
        return rotation


class PagedAttention(CachedAttention):
    """What one call of attention in a model asks of the cache. Keys and values are padded to one width.

    value_dim: of the values, where they are narrower than keys (DeepSeek's MLA).
    """

    def __init__(self, call: Call, build: Build) -> None:
        window = call.window if call.window < build.max_positions else 0
        super().__init__(
            call.heads,
            call.kv_heads,
            call.head_dim,
            all_kv_heads=call.kv_heads * build.group.size,
            window=window,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        self.value_dim = call.value_dim

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, context: AttentionContext
    ) -> Tensor:
        """Attend: [1, heads, num_tokens, head_dim] -> [1, num_tokens, heads, value_dim]. sinks: [heads] or None."""
        if self.value_dim < self.head_dim:
            value = F.pad(value, (0, self.head_dim - self.value_dim))
        heads = torch.cat([each[0].transpose(0, 1) for each in (query, key, value)], dim=1)
        scores = None if sinks is None else sinks.float().contiguous()
        merged = MergedHeads(heads, None, None, 0.0, self.kernels.norm_rotate, scores)
        attended = context.attend(self.cache_index, merged, self.window)
        return attended[None, ..., : self.value_dim]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention; heads of one rank. path: of the module that calls. window: 0 = all tokens."""

    path: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    sinks: bool


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in the paged cache of the step that is computed; arguments as of `AttentionInterface`."""
    recorder = _Recorder.current
    if recorder is not None:
        return recorder.record(module, query, key, value, attention_mask, scaling, others), None
    layer, step = getattr(module, _PLACE)
    if step.context is None:
        raise RuntimeError("attention was called outside of a step")
    return layer(query, key, value, others.get("s_aux"), step.context), None


class _Recorder:
    """Records the calls of attention of one pass on the device meta."""

    current: _Recorder | None = None

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self._paths = {module: path for path, module in model.named_modules()}

    def record(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        others: dict[str, Any],
    ) -> Tensor:
        """Keep what a call asks for; returns what has the shape of its result."""
        path = self._paths[module]
        head_dim, value_dim = query.shape[-1], value.shape[-1]
        others.setdefault("is_causal", getattr(module, "is_causal", True))
        self._refuse(path, mask, others)
        if any(call.path == path for call in self.calls):
            raise CheckpointError(f"config.json: {path} attends twice in a step, which is not supported")
        if key.shape[2] != query.shape[2] or value_dim > head_dim:
            raise CheckpointError(f"config.json: {path} attends to other keys than those of its own tokens")
        scale = head_dim**-0.5 if scaling is None else float(scaling)
        window, softcap = int(others.get("sliding_window") or 0), float(others.get("softcap") or 0.0)
        self.calls.append(
            Call(
                path,
                query.shape[1],
                key.shape[1],
                head_dim,
                value_dim,
                scale,
                window,
                softcap,
                others.get("s_aux") is not None,
            )
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value_dim)

    def _refuse(self, path: str, mask: Tensor | None, others: dict[str, Any]) -> None:
        asked = [name for name in REFUSED if others.get(name) is not None]
        if mask is not None:
            asked.append("a mask of its own")
        if others.get("is_causal") is False:
            asked.append("attention that is not causal")
        if asked:
            raise CheckpointError(
                f"config.json: {path} wants {', '.join(asked)}, which the paged attention does not have"
            )


def record(model: nn.Module, run: Callable[[Tensor, Tensor], Tensor], tokens: int = 4) -> list[Call]:
    """Run a model that is on the device meta over a few tokens and return its calls of attention, in order.

    run: ids, positions [num_tokens] -> [num_tokens, hidden]. Raises `CheckpointError` for what a paged cache cannot
    give, and where the model asks for the contents of a tensor.
    """
    recorder = _Recorder.current = _Recorder(model)
    ids = torch.zeros(tokens, dtype=torch.int32, device="meta")
    try:
        with torch.no_grad():
            run(ids, ids)
    except CheckpointError:
        raise
    except Exception as error:
        # Anything may come out of a model that was not written for this.
        raise CheckpointError(
            f"config.json: {type(model).__name__} does not run over a paged cache: {type(error).__name__}: {error}"
        ) from error
    finally:
        _Recorder.current = None
    return recorder.calls


def connect(model: nn.Module, calls: Sequence[Call], layers: Iterable[nn.Module], step: Step) -> None:
    """Have each module that calls attention find its layer and the step."""
    for call, layer in zip(calls, layers, strict=True):
        object.__setattr__(model.get_submodule(call.path), _PLACE, (layer, step))


AttentionInterface.register(NAME, attend)
