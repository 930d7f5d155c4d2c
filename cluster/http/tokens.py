"""`POST /tokenize` and `POST /detokenize`: what the server's tokenizer makes of a text, a chat, or ids.

Source: vLLM's server, whose shapes these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Raw, json

from cluster.http.base_endpoint import Endpoint, Incoming, Services
from cluster.http.exchange import Answer
from cluster.openai.call import PromptOptions
from cluster.openai.checking import checked_fields, refuse_other_models
from cluster.openai.conversation import conversation_of
from cluster.openai.hints import Hints
from cluster.openai.prompts import chat_ids
from cluster.openai.refusals import Refusal
from cluster.openai.schema import DetokenizeFields, TokenizeFields
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError

Work = Callable[[Mapping[str, Any], ServedModel, Hints], dict[str, Any]]
_ENCODED_AT_ONCE = 4096  # tokens: other threads get no turn while one long text is encoded
REFUSED_TOKENIZE = {
    "chat_template": Refusal((), "the model's own template is used"),
    "mm_processor_kwargs": Refusal(),
    "text": Refusal((), "use prompt"),
}


def tokenize(fields: Mapping[str, Any], model: ServedModel, hints: Hints) -> dict[str, Any]:
    """Return the tokens of a prompt or a chat; raises `InvalidRequestError` or `ApiError` naming the field."""
    checked = checked_fields(TokenizeFields, fields, REFUSED_TOKENIZE, hints)
    refuse_other_models(checked.model or model.model_id, model)
    if (checked.prompt is None) == (checked.messages is None):
        raise InvalidRequestError("prompt or messages: exactly one of them must be given", "prompt")
    tokens = _prompt_tokens(checked, model) if checked.prompt is not None else _chat_tokens(checked, model, hints)
    strings = [model.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": model.max_model_len,
        "tokens": tokens,
        "token_strs": strings if checked.return_token_strs else None,
    }


def detokenize(fields: Mapping[str, Any], model: ServedModel, hints: Hints) -> dict[str, Any]:
    """Return the text of tokens; raises `InvalidRequestError` or `ApiError` naming the field."""
    checked = checked_fields(DetokenizeFields, fields, hints=hints)
    refuse_other_models(checked.model or model.model_id, model)
    tokens = checked.tokens
    if len(tokens) > model.max_model_len:
        raise InvalidRequestError(
            f"tokens may hold {model.max_model_len} ids, as this model's context does, not {len(tokens)}; send them "
            "in parts",
            "tokens",
        )
    if tokens and not (min(tokens) >= 0 and max(tokens) < model.vocab_size):
        raise InvalidRequestError(f"tokens must be ids of this model (0 to {model.vocab_size - 1})", "tokens")
    return {"prompt": model.tokenizer.decode(tokens, skip_special_tokens=False)}


class TokensEndpoint(Endpoint):
    """Answers with what one function makes of the body."""

    def __init__(self, services: Services, work: Work) -> None:
        super().__init__(services)
        self._work = work

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        hints = Hints(incoming.front.model.strict_fields)
        body = await self._worked(incoming, lambda fields, model: _encoded(self._work(fields, model, hints)))
        incoming.tell_ignored(hints.names)
        await answer.json(200, body)


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Return a body whose lists may be of millions."""
    return json.encode({name: _in_parts(value) if isinstance(value, list) else value for name, value in body.items()})


def _in_parts(values: list[Any]) -> Raw:
    parts = [values[start : start + _ENCODED_AT_ONCE] for start in range(0, len(values), _ENCODED_AT_ONCE)]
    return Raw(b"[" + b",".join([json.encode(part)[1:-1] for part in parts]) + b"]")


def _prompt_tokens(checked: TokenizeFields, model: ServedModel) -> list[int]:
    for name in ("tools", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt"):
        if getattr(checked, name) is not None:
            raise InvalidRequestError(f"{name} is allowed only with messages", name)
    return model.tokenizer.encode(checked.prompt or "", add_special_tokens=checked.add_special_tokens is not False)


def _chat_tokens(checked: TokenizeFields, model: ServedModel, hints: Hints) -> list[int]:
    options = PromptOptions(add_special_tokens=checked.add_special_tokens is True)
    return chat_ids(conversation_of(checked, model, hints), options, model)
