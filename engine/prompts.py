"""What a caller of `LLM` gives it: prompts, conversations and their parameters, in the forms that vLLM takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams, plain


class TokenArray(Protocol):
    """A numpy array or a tensor of token ids: of one prompt, or [prompts, tokens]."""

    def tolist(self) -> list[Any]:
        """Return lists of Python's own numbers."""


Prompt = str | Sequence[int] | TokenArray | Mapping[str, Any]
Message = Mapping[str, Any]
FORMS = "a string, token ids, or a mapping with prompt or prompt_token_ids"


def as_list(prompts: Prompt | Sequence[Prompt] | None) -> list[str | list[int]]:
    """Return texts and lists of token ids, one for each prompt; one alone becomes a list of one.

    Raises `InvalidRequestError` for what is no prompt.
    """
    given = plain(prompts)
    if isinstance(given, str | Mapping):
        return [_prompt(given, "prompts")]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise _no_prompt("prompts", f"{FORMS}, or a list of these", given)
    if given and isinstance(plain(given[0]), int):
        return [_prompt(given, "prompts")]
    return [_prompt(prompt, f"prompts[{number}]") for number, prompt in enumerate(given)]


def _prompt(given: Any, field: str) -> str | list[int]:
    found = plain(given)
    if isinstance(found, Mapping):
        other = next((name for name in found if name not in ("prompt", "prompt_token_ids")), None)
        if other is not None and found[other] is not None:
            raise InvalidRequestError(
                f"{field}.{other} is not supported; give prompt or prompt_token_ids alone", f"{field}.{other}"
            )
        ids, text = found.get("prompt_token_ids"), found.get("prompt")
        return _prompt(text if ids is None else ids, f"{field}.{'prompt' if ids is None else 'prompt_token_ids'}")
    if isinstance(found, str):
        return found
    if not isinstance(found, Sequence) or isinstance(found, bytes):
        raise _no_prompt(field, FORMS, found)
    return [plain(token) for token in found]


def _no_prompt(field: str, forms: str, found: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{field} must be {forms}, not {type(found).__name__}", field, "invalid_type")


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation becomes a list of one."""
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))


def params_of(given: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    """Return one for each of `count` prompts. Raises `InvalidRequestError` when there are more or fewer."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(
            f"sampling_params must be one, or one per prompt: {count} prompts came with {len(given)}",
            "sampling_params",
        )
    return given


def truncated(token_ids: list[int], params: SamplingParams, context_len: int) -> list[int]:
    """Return the last tokens of a prompt, as many as `params` keeps; -1 leaves `max_tokens` room in the context."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return token_ids
    return token_ids[-(max(context_len - (params.max_tokens or 1), 1) if keep == -1 else keep) :]
