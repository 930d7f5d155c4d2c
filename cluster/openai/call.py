"""One accepted call of a client: its prompts or its conversation, and the engine requests that it becomes.

Of a chat, what the model's template does not read is refused where it is part of what was said, else it is a hint.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from cluster.errors import ApiError, as_api_error
from cluster.openai.fields import Hints, Message, Prompt
from cluster.openai.parsers.reasoning import ReasoningParser
from cluster.openai.parsers.tool_choice import ToolUse
from cluster.openai.request_fields import ChatFields, TokenizeFields
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError, PromptTooLongError, context_words
from engine.request import Request
from engine.sampling_params import SamplingParams

_MESSAGE_LOOP = re.compile(r"\bfor\s+(\w+)\s+in\s+\w*messages\b")
ChatPrompt = ChatFields | TokenizeFields  # the fields that make a prompt out of messages


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat and how its template is to be filled in."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How prompts become tokens.

    truncate: keep that many tokens, -1 = as many as fit; None = refuse what is too long. keeps_beginning: which of
    them, the first ones or the last. add_special_tokens: whether the tokenizer adds its own.
    """

    truncate: int | None = None
    add_special_tokens: bool = True
    keeps_beginning: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One accepted call of a client: what to generate from, and how to answer.

    request_id: made by the server. client_id: the `request_id` of the client, "" without; only echoed.
    seed: the client's, or a random one. prompts: of a completion; conversation: of a chat. Choices of the answer are
    numbered prompt by prompt: `prompt index x params.n + choice`.
    prompt_logprobs: alternatives of each prompt token in the answer, None = no log-probabilities.
    continuous_usage: every chunk has the usage. echo: the prompt comes before the output; echo_only: nothing but the
    prompt was asked for, so the one token that the engine draws is neither shown nor counted.
    structured_param: the client's field that `params.structured` came from. tool_use: how tools are used, None = not
    at all; thinking: parser of what comes before the answer, None = nothing does. created: seconds since 1970.
    thinking_budget: tokens after which thinking is ended, None = it ends by itself.
    shows_thinking: whether the answer holds what was thought. tokens_as_ids: log-probabilities name tokens by id.
    tells_cache: whether the answer tells what a prefix cache spared, which depends on what else was asked.
    ignored: fields of the client's that had no use (`Hints.names`).
    fits_output: `params.max_tokens` may be more than the context holds behind the prompt: it is cut to that.
    """

    request_id: str
    params: SamplingParams
    seed: int
    prompts: tuple[Prompt, ...] = ()
    conversation: Conversation | None = None
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: bytes = b""
    client_id: str = ""
    prompt_logprobs: int | None = None
    continuous_usage: bool = False
    echo: bool = False
    echo_only: bool = False
    prompt_options: PromptOptions = PromptOptions()
    structured_param: str = ""
    tool_use: ToolUse | None = None
    thinking: type[ReasoningParser] | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    tells_cache: bool = True
    ignored: tuple[str, ...] = ()
    fits_output: bool = False
    shows_thinking: bool = True
    thinking_budget: int | None = None
    tokens_as_ids: bool = False

    def clients_error(self, error: ApiError | InvalidRequestError) -> ApiError:
        """Return an error in the client's words, on every ingress: it names the field that the client sent."""
        typed = as_api_error(error)
        if typed.param == "structured":
            if self.tool_use is not None:
                typed.message = self.tool_use.explained(typed.message)
            typed.param = self.structured_param or "tools"
        elif typed.param == "prompt" and self.conversation is not None:
            typed.param = "messages"
        return typed


Parse = Callable[[Mapping[str, Any], ServedModel], Call]


def build_requests(call: Call, model: ServedModel) -> list[Request]:
    """Return one request per prompt, in order; raises `InvalidRequestError` naming the field.

    Long prompts take milliseconds and more: an event loop leaves them to an `FairThreadPool`.
    """
    _check_ids(call.params, model.vocab_size)
    param = "prompt" if call.conversation is None else "messages"
    prompts = [_truncated(ids, call, model) for ids in prompt_ids(call, model)]
    wanted = 1 if call.fits_output else _wanted(call.params)
    for ids in prompts:
        _check_length(len(ids), wanted, model, param)
    params = model.tokenizer.with_bad_words(call.params)
    fitted = [_fitted(params, ids, call, model) for ids in prompts]
    return [_request(call, fitted[number], number, ids, len(prompts)) for number, ids in enumerate(prompts)]


def _fitted(params: SamplingParams, ids: Sequence[int], call: Call, model: ServedModel) -> SamplingParams:
    """Return the parameters of a prompt, whose output is cut to the context where the call lets it be."""
    if not call.fits_output and call.thinking_budget is None:
        return params
    room = model.longest_sequence - len(ids)
    return replace(params, max_tokens=min(params.max_tokens or room, room))


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
    room = max(model.longest_sequence - _wanted(call.params), 1) if keep == -1 else keep
    return ids[:room] if call.prompt_options.keeps_beginning else ids[-room:]


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Ids that clients send index tables as wide as the logits."""
    for param, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("logit_bias", [token for token, _ in params.logit_bias]),
    ):
        if ids and max(ids) >= vocab_size:
            raise InvalidRequestError(
                f"{param} holds {max(ids)}, which is no token id of this model (0 to {vocab_size - 1})", param
            )


def _wanted(params: SamplingParams) -> int:
    """Tokens of output that there must be room for."""
    return params.max_tokens or max(params.min_tokens, 1)


def _check_length(length: int, wanted: int, model: ServedModel, param: str) -> None:
    if length == 0:
        raise InvalidRequestError(f"{param} is empty: it must give at least one token", param)
    if length + wanted <= model.longest_sequence:
        return
    words = context_words(model.longest_sequence, model.longest_sequence < model.max_model_len)
    alone = length >= model.longest_sequence
    raise PromptTooLongError(
        f"{words}you requested {length + wanted} tokens ({length} in the {param}, {wanted} in the completion). "
        f"Please reduce the length of the {param}{'' if alone else ' or of the completion'}.",
        param,
        length,
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


def conversation_of(checked: ChatPrompt, model: ServedModel, hints: Hints) -> Conversation:
    """Return the conversation; raises `InvalidRequestError` naming what the model's template does not read.

    hints: notes what it may do without.
    """
    if not checked.messages:
        raise InvalidRequestError("messages must hold at least one message", "messages")
    if checked.continue_final_message and checked.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt must be false with continue_final_message=true", "add_generation_prompt"
        )
    template = model.tokenizer.chat_template or ""
    messages = [_message(message, f"messages[{i}]", template, hints) for i, message in enumerate(checked.messages)]
    add = not checked.continue_final_message and checked.add_generation_prompt is not False
    return Conversation(tuple(messages), add, checked.continue_final_message, _options(checked, template, hints))


def _options(checked: ChatPrompt, template: str, hints: Hints) -> dict[str, Any]:
    """Variables of the template beside the messages."""
    kwargs = checked.chat_template_kwargs
    given = kwargs.model_dump(exclude_none=True) if kwargs else {}
    options = {
        name: value
        for name, value in given.items()
        if _is_used(name, f"chat_template_kwargs.{name}", template, hints)
    }
    effort = checked.reasoning_effort
    if effort is not None and _is_used("reasoning_effort", "reasoning_effort", template, hints):
        options["reasoning_effort"] = effort
    if checked.tools and checked.tool_choice != "none":
        _refuse_unread("tools", "tools", template)
        options["tools"] = [tool.for_template() for tool in checked.tools]
    return options


def _message(message: Message, param: str, template: str, hints: Hints) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    one: dict[str, Any] = {"role": role, "content": message.content}
    if message.name is not None and _is_used(_names_read(template), f"{param}.name", template, hints):
        one["name"] = message.name
    one |= _thoughts(message, param, template, hints)
    if message.tool_calls is not None:
        _only_from("assistant", "tool_calls", message, param)
        _refuse_unread("tool_calls", f"{param}.tool_calls", template)
        one["tool_calls"] = [call.for_template() for call in message.tool_calls]
    if message.role == "tool" or message.tool_call_id is not None:
        one["tool_call_id"] = _tool_call_id(message, param, template)
    return one


def _thoughts(message: Message, param: str, template: str, hints: Hints) -> dict[str, str]:
    """What the assistant thought, by either name; where both say something, the older counts."""
    found: dict[str, str] = {}
    for name, text in (("reasoning_content", message.reasoning_content), ("reasoning", message.reasoning)):
        if text is None:
            continue
        _only_from("assistant", name, message, param)
        if not _is_used("reasoning_content", f"{param}.{name}", template, hints):
            continue
        if found.setdefault("reasoning_content", text) != text:
            other = f"{param}.{name}"
            hints.leave(InvalidRequestError(f"{other} is not what reasoning_content says; send one of them", other))
    return found


def _tool_call_id(message: Message, param: str, template: str) -> str:
    _only_from("tool", "tool_call_id", message, param)
    _refuse_unread("tool|tool_call_id|ipython", f"{param}.role", template)
    if message.tool_call_id is None:
        name = f"{param}.tool_call_id"
        raise InvalidRequestError(
            f"{name} is missing: it names the call that this answers", name, "missing_required_parameter"
        )
    return message.tool_call_id


def _only_from(role: str, field: str, message: Message, param: str) -> None:
    if message.role != role:
        name = f"{param}.{field}"
        raise InvalidRequestError(f"{name} is allowed only in messages with role {role!r}", name)


@lru_cache(maxsize=16)
def _names_read(template: str) -> str:
    """The pattern of a message's name as the template would read it: tools and their calls have names too."""
    variables = "|".join({"message", *_MESSAGE_LOOP.findall(template)})
    return rf"""(?:{variables})(?:\.name|\.get\(\s*["']name|\[\s*["']name)"""


def _is_used(variable: str, param: str, template: str, hints: Hints) -> bool:
    """Whether the template reads `variable`; where not, the field is a hint."""
    if template_reads(template, variable):
        return True
    hints.leave(_unread(param))
    return False


def _refuse_unread(variable: str, param: str, template: str) -> None:
    if not template_reads(template, variable):
        raise _unread(param)


def _unread(param: str) -> InvalidRequestError:
    message = f"{param} is not used by this model's chat template; leave it out"
    return InvalidRequestError(message, param, "unsupported_parameter")


@lru_cache(maxsize=256)  # asked for each of thousands of messages
def template_reads(template: str, variable: str) -> bool:
    """Whether a chat template reads a variable. variable: its name, or several with | between them."""
    return re.search(rf"\b(?:{variable})\b", template) is not None
