"""The one validator of every ingress: a client's fields in, an accepted call out, or an error that names the field.

The first wrong field is named. Nothing here waits, and nothing knows HTTP: gRPC and batch use the same functions.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.client_id import is_client_id
from cluster.errors import ApiError
from cluster.openai.body import checked_fields
from cluster.openai.call import Call, PromptOptions, conversation_of
from cluster.openai.fields import Hints
from cluster.openai.parsers.reasoning import ReasoningParser
from cluster.openai.parsers.tool_choice import ToolUse, tool_use
from cluster.openai.refusals import REFUSED_CHAT, REFUSED_COMPLETION
from cluster.openai.request_fields import (
    ChatFields,
    CompletionFields,
    GenerationFields,
    NamedTool,
    from_response_format,
    from_structured_outputs,
    structured_output,
)
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError
from engine.sampling_params import (
    ALL_LOGPROBS,
    MAX_LOGPROBS,
    MAX_STOPS,
    MOST_LOGPROBS,
    SamplingParams,
    StructuredOutput,
)

MAX_PRIORITY = 2**31 - 1
_OTHERWISE = ("structured_outputs", "truncate_prompt_tokens")  # `SamplingParams` has them for `LLM` alone
_SAMPLING = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in GenerationFields.model_fields and field.name not in _OTHERWISE
]
_MAX_SALT_BYTES = 256


def parse_completion(fields: Mapping[str, Any], model: ServedModel) -> Call:
    """Check a completion; raises `ApiError` or `InvalidRequestError` that names the first wrong field."""
    hints = Hints(model.strict_fields)
    checked = checked_fields(CompletionFields, fields, REFUSED_COMPLETION, hints)
    refuse_other_models(checked.model, model)
    check_logprobs(checked.logprobs, "logprobs", model)
    named = checked.logprob_token_ids or ()
    more: dict[str, Any] = {"logprobs": 0 if named and checked.logprobs is None else checked.logprobs}
    echo_only = checked.echo and checked.max_tokens == 0
    if echo_only:
        more["max_tokens"] = 1  # the engine draws at least one, which is not shown
    if checked.echo and checked.logprobs is not None:
        if named or not 0 <= checked.logprobs <= MAX_LOGPROBS:
            message = f"logprobs of an echoed prompt are those of its {MAX_LOGPROBS} best tokens: send {MAX_LOGPROBS}"
            raise InvalidRequestError(message, "logprob_token_ids" if named else "logprobs")
        more["prompt_logprobs"] = max(checked.logprobs, checked.prompt_logprobs or 0)
    structured, param = _structured(checked)
    params = _sampling_params(checked, hints, model, structured=structured, **more)
    _check_many_logprobs(params, "logprobs", model)
    return Call(
        prompts=tuple(checked.prompt),
        echo=checked.echo,
        echo_only=echo_only,
        structured_param=param,
        prompt_options=_prompt_options(checked, add_special_tokens=True),
        **_common("cmpl-", checked, params, model, hints),
    )


def parse_chat(fields: Mapping[str, Any], model: ServedModel) -> Call:
    """Check a chat completion; raises `ApiError` or `InvalidRequestError` that names the first wrong field."""
    hints = Hints(model.strict_fields)
    checked = checked_fields(ChatFields, fields, REFUSED_CHAT, hints)
    refuse_other_models(checked.model, model)
    use = _tool_use(checked, model)
    structured, param = _structured(checked, checked)
    if use is not None:
        use, structured, param = _with_tools(use, structured, param, model)
    params = _sampling_params(
        checked,
        hints,
        model,
        logprobs=_chat_logprobs(checked, model),
        max_tokens=_chat_max_tokens(checked),
        structured=structured,
    )
    _check_many_logprobs(params, "top_logprobs", model)
    thinking = model.reasoning_parser if structured is None and checked.separate_reasoning is not False else None
    params = _showing_markers(params, use, thinking, model)
    conversation = conversation_of(checked, model, hints)
    return Call(
        conversation=conversation,
        structured_param=param,
        tool_use=use,
        thinking=thinking,
        thinking_budget=_thinking_budget(checked, params, model, hints),
        shows_thinking=checked.include_reasoning is not False,
        prompt_options=_prompt_options(checked, add_special_tokens=False),
        **_common("chatcmpl-", checked, params, model, hints),
    )


def _sampling_params(checked: GenerationFields, hints: Hints, model: ServedModel, **more: Any) -> SamplingParams:
    """Return what the request says, and where it says nothing what the model's generation config does."""
    if checked.prompt_logprobs == ALL_LOGPROBS:
        message = f"prompt_logprobs tells the best {MAX_LOGPROBS} of each token at most: send {MAX_LOGPROBS}"
        raise InvalidRequestError(message, "prompt_logprobs", "unsupported_value")
    given = {name: value for name in _SAMPLING if (value := getattr(checked, name)) is not None}
    stop = given.get("stop", ())
    if len(stop) <= MAX_STOPS and "" in stop and not hints.strict:  # a string that is never reached stops nothing
        hints.ignore("stop")
        given["stop"] = tuple([one for one in stop if one])
    said = {**given, **more}
    limit = model.sampling_defaults.get("max_tokens")
    if limit is not None:
        said["max_tokens"] = _within(int(limit), said.get("max_tokens"), _max_tokens_name(checked), hints)
    return SamplingParams(**{**model.sampling_defaults, **said})


def _within(limit: int, wanted: int | None, param: str, hints: Hints) -> int:
    """Return the output tokens of a request where the generation config has the most that any may have.

    Source: vLLM, `--generation-config`: its `max_new_tokens` is a limit for all requests.
    """
    if wanted is None or wanted <= limit:
        return limit if wanted is None else wanted
    message = f"{param} must be at most {limit}, the max_new_tokens of this server's generation config, not {wanted}"
    hints.leave(InvalidRequestError(message, param, "unsupported_value"))
    return limit


def _max_tokens_name(checked: GenerationFields) -> str:
    chat = checked if isinstance(checked, ChatFields) else None
    return "max_tokens" if chat is None or chat.max_completion_tokens is None else "max_completion_tokens"


def _common(
    prefix: str, checked: GenerationFields, params: SamplingParams, model: ServedModel, hints: Hints
) -> dict[str, Any]:
    """What calls of all kinds hold; the last step, since it notes which hints were found on the way."""
    options, takes_default = checked.stream_options, getattr(checked, _max_tokens_name(checked)) is None
    _check_stream(checked, hints)
    check_priority(checked.priority, model)
    client_id = checked.request_id or ""
    if client_id and not is_client_id(client_id):
        raise InvalidRequestError("request_id must be 1 to 128 visible ASCII characters", "request_id")
    return {
        "request_id": prefix + secrets.token_hex(16),
        "params": params,
        "seed": secrets.randbits(63) if params.seed is None else params.seed,
        "stream": checked.stream,
        "include_usage": options is not None and options.include_usage,
        "continuous_usage": options is not None and options.include_usage and options.continuous_usage_stats,
        "prompt_logprobs": checked.prompt_logprobs,
        "return_token_ids": checked.return_token_ids,
        "tokens_as_ids": checked.return_tokens_as_token_ids,
        "priority": checked.priority,
        "cache_salt": checked_salt(checked.cache_salt),
        "client_id": client_id,
        "ignored": hints.names,
        # What the server's config says must not be too much for a client's prompt.
        "fits_output": takes_default and "max_tokens" in model.sampling_defaults,
    }


def _check_stream(checked: GenerationFields, hints: Hints) -> None:
    options = checked.stream_options
    if options is not None and not checked.stream:
        raise InvalidRequestError("stream_options is allowed only with stream=true", "stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        param = "stream_options.continuous_usage_stats"
        hints.leave(InvalidRequestError(f"{param} is allowed only with include_usage=true", param))
    if checked.stream and checked.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs is not told in streams; send stream=false", "prompt_logprobs")


def _prompt_options(checked: GenerationFields, add_special_tokens: bool) -> PromptOptions:
    keep = checked.truncate_prompt_tokens
    if keep is not None and keep != -1 and not 1 <= keep <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be between 1 and {MAX_PRIORITY}, or -1 for as many as fit, not {keep}",
            "truncate_prompt_tokens",
        )
    add = checked.add_special_tokens
    keeps_beginning = checked.truncation_side == "right"
    return PromptOptions(keep, add_special_tokens if add is None else add, keeps_beginning)


def _structured(checked: GenerationFields, chat: ChatFields | None = None) -> tuple[StructuredOutput | None, str]:
    """What the output must match, and the field that says so."""
    wanted = chat.response_format if chat is not None else None
    found: dict[str, StructuredOutput] = {}
    if wanted is not None and (format_ := from_response_format(wanted)) is not None:
        found["response_format"] = format_
    if checked.structured_outputs is not None:
        found["structured_outputs"] = from_structured_outputs(checked.structured_outputs)
    if checked.regex is not None:
        found["regex"] = structured_output("regex", checked.regex, "regex")
    if checked.ebnf is not None:
        found["ebnf"] = structured_output("grammar", checked.ebnf, "ebnf")
    if len(found) > 1:
        both = " and ".join(reversed(found))
        raise InvalidRequestError(f"{both} say the same thing: send one of them", next(reversed(found)))
    return next(((one, name) for name, one in found.items()), (None, ""))


def check_logprobs(top: int | None, param: str, model: ServedModel) -> None:
    """Raise `InvalidRequestError` where more alternatives of each token are wanted than the server tells."""
    most = model.vocab_size if model.max_logprobs == ALL_LOGPROBS else model.max_logprobs
    if top is None or 0 <= top <= most or (top == ALL_LOGPROBS and most >= model.vocab_size):
        return
    if top == ALL_LOGPROBS:
        message = (
            f"{param} -1 asks for all {model.vocab_size} tokens of the vocabulary; this server tells the best {most} "
            f"at most (--max-logprobs): send {most}, or name tokens in logprob_token_ids"
        )
        raise InvalidRequestError(message, param, "unsupported_value")
    raise InvalidRequestError(f"{param} must be between 0 and {most}, not {top} (--max-logprobs)", param)


def _check_many_logprobs(params: SamplingParams, param: str, model: ServedModel) -> None:
    """Raise `InvalidRequestError` where an answer would hold more log-probabilities than a router may."""
    if not params.whole_rows:
        return
    each = params.n * params.num_alternatives(model.vocab_size)
    tokens = min(params.max_tokens or model.longest_sequence, model.longest_sequence)
    if each * tokens > MOST_LOGPROBS:
        fits = MOST_LOGPROBS // each
        instead = f"send max_tokens {fits}" if fits else "ask for fewer choices"
        raise InvalidRequestError(
            f"{param} of {each} tokens at each of {tokens} positions are more than the {MOST_LOGPROBS} of an answer "
            f"at most; {instead}, or name tokens in logprob_token_ids",
            param,
        )


def _chat_logprobs(checked: ChatFields, model: ServedModel) -> int | None:
    check_logprobs(checked.top_logprobs, "top_logprobs", model)
    for name in ("top_logprobs", "logprob_token_ids"):
        if getattr(checked, name) and not checked.logprobs:
            raise InvalidRequestError(f"{name} is allowed only with logprobs=true", name)
    named = len(checked.logprob_token_ids or ())
    if named and checked.top_logprobs not in (None, 0, named):
        message = f"top_logprobs must be {named}, as many as logprob_token_ids has, or left out"
        raise InvalidRequestError(message, "top_logprobs")
    return (checked.top_logprobs or 0) if checked.logprobs else None


def _thinking_budget(checked: ChatFields, params: SamplingParams, model: ServedModel, hints: Hints) -> int | None:
    """What ends the thinking is not drawn, so it has no log-probability; and choices would end theirs apart."""
    budget, param = checked.thinking_token_budget, "thinking_token_budget"
    if budget is None:
        return None
    if not 1 <= budget <= MAX_PRIORITY:
        raise InvalidRequestError(f"{param} must be between 1 and {MAX_PRIORITY}, not {budget}", param)
    if model.reasoning_parser is None:
        message = f"{param} needs a server with --reasoning-parser, which this one has not for the model"
        raise InvalidRequestError(message, param, "unsupported_parameter")
    if params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None:
        raise InvalidRequestError(f"{param} is allowed only with n 1 and without log-probabilities", param)
    if checked.separate_reasoning is False:
        raise InvalidRequestError(f"{param} is not allowed with separate_reasoning=false", param)
    if params.structured is not None:
        message = f"{param} has no use where the output must match something: nothing is thought before it"
        hints.leave(InvalidRequestError(message, param, "unsupported_parameter"))
        return None
    return budget


def _chat_max_tokens(checked: ChatFields) -> int | None:
    """`max_completion_tokens` is today's name; without either, a chat may fill the context."""
    old, new = checked.max_tokens, checked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens are one setting: send only max_completion_tokens", "max_tokens"
        )
    if new is not None and not 1 <= new <= MAX_PRIORITY:
        message = f"max_completion_tokens must be between 1 and {MAX_PRIORITY}, not {new}"
        raise InvalidRequestError(message, "max_completion_tokens")
    return old if new is None else new


def _tool_use(checked: ChatFields, model: ServedModel) -> ToolUse | None:
    """How tools are used; OpenAI's default is auto where there are tools."""
    tools: dict[str, dict[str, Any] | None] = {}
    for i, tool in enumerate(checked.tools or ()):
        name = tool.function.name
        if name in tools:
            param = f"tools[{i}].function.name"
            raise InvalidRequestError(f"{param} must be unique: {name} is there twice", param)
        tools[name] = tool.function.parameters
    choice = checked.tool_choice
    named = choice.name if isinstance(choice, NamedTool) else None
    mode = choice if isinstance(choice, str) else None
    parallel = checked.parallel_tool_calls is not False
    return tool_use(tools, mode, named=named, parallel=parallel, parser=model.tool_parser)


def _with_tools(
    use: ToolUse, structured: StructuredOutput | None, param: str, model: ServedModel
) -> tuple[ToolUse, StructuredOutput | None, str]:
    """How tools are used, what the output must match, and the field that says so.

    A response format is that of an answer: where a call is forced, there is none; else the model writes one or calls.
    """
    if structured is not None and param != "response_format":
        raise InvalidRequestError(
            f"{param} cannot be used beside tools that may be called; send tool_choice 'none' or response_format",
            param,
        )
    if structured is None or use.mode != "auto":
        return use, use.structured(), "tools"
    use, structured = use.or_answer(structured, model.tokenizer)
    return use, structured, param


def _showing_markers(
    params: SamplingParams, use: ToolUse | None, thinking: type[ReasoningParser] | None, model: ServedModel
) -> SamplingParams:
    """Parsers find calls and thinking by what models write around them, which may be special tokens."""
    hidden = (use is not None and use.keeps_special_tokens(model.tokenizer)) or (
        thinking is not None and thinking.keeps_special_tokens(model.tokenizer)
    )
    return dataclasses.replace(params, skip_special_tokens=False) if hidden else params


def check_priority(priority: int, model: ServedModel) -> None:
    """Raise `InvalidRequestError` for a priority out of range, and for one that the server would not heed."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", "priority")
    if priority and not model.by_priority:
        raise InvalidRequestError(
            "priority is not supported by this server, where requests run in order of arrival "
            "(--scheduling-policy fcfs); leave it out or send 0",
            "priority",
            "unsupported_parameter",
        )


def checked_salt(salt: str | None) -> bytes:
    """Return the salt of a client's cached prefixes; raises `InvalidRequestError` for one that is too long."""
    salted = (salt or "").encode()
    if len(salted) > _MAX_SALT_BYTES:
        raise InvalidRequestError(f"cache_salt may have at most {_MAX_SALT_BYTES} bytes", "cache_salt")
    return salted


def refuse_other_models(name: str, model: ServedModel) -> None:
    """Raise `ApiError` (404) unless `name` is one of the served model's."""
    if name not in model.names:
        raise unknown_model(name, model.names)


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    """Return the error (404) for a model that is not served."""
    there = ", ".join([f"`{one}`" for one in known])
    message = f"The model `{name[:100]}` does not exist. This server has {there}."  # as clients of vLLM look for it
    return ApiError("model_not_found", message, param="model")
