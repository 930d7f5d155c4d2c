"""What callers of `engine.llm.LLM` may pass in several forms, in one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from engine.config import config_fields
from engine.errors import ConfigError, InvalidRequestError
from engine.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


def as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt, as text or token ids, becomes a list of one. Raises `InvalidRequestError` for what is no prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a string, a list of token ids, or a list of these, not {type(prompts).__name__}",
            "prompts",
            "invalid_type",
        )
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
            raise InvalidRequestError(
                f"prompts[{number}] must be a string or a list of token ids, not {type(prompt).__name__}",
                f"prompts[{number}]",
                "invalid_type",
            )
    return cast("Sequence[Prompt]", prompts)


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation becomes a list of one."""
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))


def params_of(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    """Return one for each of `count` prompts. Raises `InvalidRequestError` when there are more or fewer."""
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(
            f"sampling_params must be one, or one per prompt: {count} prompts came with {len(given)}",
            "sampling_params",
        )
    return given


def refuse_unknown(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a setting that `EngineConfig` does not have, with the nearest that it has."""
    for name in settings:
        if name not in config_fields():
            near = difflib.get_close_matches(name, config_fields(), n=1)
            hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(config_fields())
            raise ConfigError(f"unknown setting {name}; {hint}", name)
