"""From an accepted call to engine requests: template, tokens, and whether they fit the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cluster.openai.call import Call, PromptOptions
from cluster.openai.conversation import Conversation
from cluster.openai.field_types import Prompt
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError, PromptTooLongError, context_words
from engine.request import Request
from engine.sampling_params import SamplingParams

Parse = Callable[[Mapping[str, Any], ServedModel], Call]


def build_requests(call: Call, model: ServedModel) -> list[Request]:
    """Return one request per prompt, in order; raises `InvalidRequestError` naming the field.

    Long prompts take milliseconds and more: an event loop leaves them to an `OffLoop`.
    """
    _check_ids(call.params, model.vocab_size)
    param = "prompt" if call.conversation is None else "messages"
    prompts = [_truncated(ids, call, model) for ids in prompt_ids(call, model)]
    for ids in prompts:
        _check_length(len(ids), call, model, param)
    params = model.tokenizer.with_bad_words(call.params)
    return [_request(call, params, number, ids, len(prompts)) for number, ids in enumerate(prompts)]


def prompt_ids(call: Call, model: ServedModel) -> list[list[int]]:
    """Return the token ids of each prompt of a call, however long; raises `InvalidRequestError`."""
    if call.conversation is not None:
        return [chat_ids(call.conversation, call.prompt_options, model)]
    return [_prompt_ids(prompt, call.prompt_options, model) for prompt in call.prompts]


def chat_ids(conversation: Conversation, options: PromptOptions, model: ServedModel) -> list[int]:
    """Return the tokens of a chat as the model's template writes it; raises `InvalidRequestError`.

    Control tokens are the template's alone: in the text of messages and tools they are plain text.
    """
    return model.tokenizer.encode_chat(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        options=conversation.options,
        add_special_tokens=options.add_special_tokens,
    )


def _prompt_ids(prompt: Prompt, options: PromptOptions, model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt, add_special_tokens=options.add_special_tokens) if prompt else []
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < model.vocab_size)
        raise InvalidRequestError(
            f"prompt holds {wrong}, which is no token id of this model (0 to {model.vocab_size - 1})", "prompt"
        )
    return prompt


def _truncated(ids: list[int], call: Call, model: ServedModel) -> list[int]:
    keep = call.prompt_options.truncate
    if keep is None:
        return ids
    return ids[-(max(model.longest_sequence - _wanted(call.params), 1) if keep == -1 else keep) :]


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Ids that clients send index tables as wide as the logits."""
    for param, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", [token for token, _ in params.logit_bias]),
    ):
        if ids and max(ids) >= vocab_size:
            raise InvalidRequestError(
                f"{param} holds {max(ids)}, which is no token id of this model (0 to {vocab_size - 1})", param
            )


def _wanted(params: SamplingParams) -> int:
    """Tokens of output that there must be room for."""
    return params.max_tokens or max(params.min_tokens, 1)


def _check_length(length: int, call: Call, model: ServedModel, param: str) -> None:
    if length == 0:
        raise InvalidRequestError(f"{param} is empty: it must give at least one token", param)
    wanted = _wanted(call.params)
    if length + wanted <= model.longest_sequence:
        return
    words = context_words(model.longest_sequence, model.longest_sequence < model.max_model_len)
    alone = length >= model.longest_sequence
    raise PromptTooLongError(
        f"{words}you requested {length + wanted} tokens ({length} in the {param}, {wanted} in the completion). "
        f"Please reduce the length of the {param}{'' if alone else ' or of the completion'}.",
        param,
    )


def _seed(call: Call, number: int) -> int:
    """A seed that the client gave is that of each prompt; without one, equal prompts must not draw alike."""
    return call.seed if call.params.seed is not None else (call.seed + number) % 2**63


def _request(call: Call, params: SamplingParams, number: int, ids: list[int], count: int) -> Request:
    return Request(
        request_id=call.request_id if count == 1 else f"{call.request_id}-{number}",
        prompt_token_ids=tuple(ids),
        params=params,
        seed=_seed(call, number),
        priority=call.priority,
        cache_salt=call.cache_salt,
    )
