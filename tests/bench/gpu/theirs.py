"""transformers' model of a checkpoint and its continuous batching, which ours is compared with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch


class Load(Protocol):
    """Prompts of token ids, and how many tokens each is followed by."""

    @property
    def prompts(self) -> Sequence[list[int]]:
        """Token ids."""

    @property
    def outputs(self) -> Sequence[int]:
        """Counts of tokens."""


def their_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model, ready to compute. Its attention is torch's sdpa: flash-attn need not be there."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # which would stand between the rows
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval()


def continuous_batching(model: Any, load: Load, sampling: Mapping[str, Any], **settings: Any) -> Any:
    """Return transformers' manager of continuous batching, told what comes, with nothing fetched from a hub.

    sampling: of its generation config. settings: of its batching config, whose page is 256 tokens.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    longest = max(map(len, load.prompts))
    drawn = {"top_k": 0, "top_p": 1.0} if sampling.get("do_sample") else {}
    ends = {"max_new_tokens": max(load.outputs), "eos_token_id": -1, "pad_token_id": 0}
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    if "auto_switch_to_flash" in known:
        settings = {"auto_switch_to_flash": False, **settings}
    return model.continuous_batching_context_manager(
        generation_config=GenerationConfig(**sampling, **drawn, **ends),
        continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False, **settings),
        workload_hints=WorkloadHints(longest, max(load.outputs), len(load.prompts)),
        timeout=5,
    )


def answered(manager: Any, load: Load, prefix: str, patience: float) -> list[list[int]]:
    """Run a load; returns the tokens of those of its requests that ended within the seconds of `patience`.

    prefix: of the requests' names, which a manager must not have seen. Raises `RuntimeError`.
    """
    for number, (prompt, count) in enumerate(zip(load.prompts, load.outputs, strict=True)):
        manager.add_request(prompt, f"{prefix}-{number}", max_new_tokens=count, eos_token_id=-1)
    answers: list[list[int]] = []
    deadline = time.monotonic() + patience
    while len(answers) < len(load.prompts) and time.monotonic() < deadline:
        found = manager.get_result(timeout=1)
        if found is None:
            if not manager.is_running():
                raise RuntimeError("transformers' thread has ended")
            continue
        if found.error is not None:
            raise RuntimeError(f"transformers failed on a request: {found.error}")
        if found.is_finished():
            answers.append(list(found.generated_tokens))
    return answers
