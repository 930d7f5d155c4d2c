"""From protocol buffers to the fields that the one validator of every ingress checks, and from deltas to responses.

Names are those of the HTTP API, so that an error names the field that the client set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic_core import from_json

from cluster.errors import ApiError
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.openai.call import Call
from cluster.openai.choices import Delta, PlacedLogprob, TokenUsage
from engine.errors import InvalidRequestError
from engine.text.tokenizer import Tokenizer

MAX_PARTS = 4096  # what any list of messages in a request may hold; the validator's own limits are lower or equal
MAX_ALL_PARTS = 16 * MAX_PARTS  # what all lists of messages in a request may hold together
NAMED_BYTES = 1024  # of fields not known here, up to which one is named: there is an object for each of them then
M = TypeVar("M", bound=Message)
Fields = dict[str, Any]
_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}


def parsed(kind: type[M], body: bytes) -> M:
    """Return the message in `body`; raises `ApiError` for bytes that are none, and for fields not known here."""
    try:
        message = kind.FromString(body)
    except DecodeError:
        raise ApiError("invalid_protobuf", f"the request is no valid {kind.DESCRIPTOR.full_name}") from None
    _check_counts(message, "", 0)
    unknown = _unknown_bytes(message)
    if unknown > NAMED_BYTES:
        raise InvalidRequestError(
            f"{kind.DESCRIPTOR.name} has fields that this server does not know; it may be older than your client",
            None,
            "unknown_parameter",
        )
    if unknown:
        _refuse_unknown(message, "")
    return message


def completion_fields(request: pb.GenerateRequest) -> Fields:
    """Return the fields of a completion."""
    fields = _flat(request)
    ids = fields.pop("prompt_token_ids", None)
    if ids is not None:
        fields["prompt"] = list(ids.ids)
    return fields


def chat_fields(request: pb.ChatRequest) -> Fields:
    """Return the fields of a chat; raises `InvalidRequestError` for JSON that is none."""
    fields = _flat(request)
    logprobs = fields.pop("logprobs", None)
    if logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": logprobs}
    fields["messages"] = [_message(one) for one in request.messages]
    if request.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}].parameters") for i, tool in enumerate(request.tools)]
    if request.HasField("tool_choice"):
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    if request.HasField("chat_template_kwargs"):
        fields["chat_template_kwargs"] = _scalars(request.chat_template_kwargs)
    return fields


def embedding_fields(request: pb.EmbedRequest) -> Fields:
    """Return the fields of a request for embeddings."""
    fields = _scalars(request)
    texts, ids = fields.pop("texts", None), fields.pop("token_ids", None)
    if texts is not None:
        fields["input"] = list(texts.texts)
    elif ids is not None:
        fields["input"] = [list(one.ids) for one in ids.lists]
    return fields


def shown(request: pb.GenerateRequest | pb.ChatRequest) -> tuple[bool, bool]:
    """Return whether text and whether token ids are returned; raises `InvalidRequestError` for another wish."""
    output = request.output or pb.OUTPUT_TEXT
    if output not in pb.Output.values():
        raise InvalidRequestError(
            f"output must be OUTPUT_TEXT, OUTPUT_TOKENS or OUTPUT_TEXT_AND_TOKENS, not {output}", "output"
        )
    return output != pb.OUTPUT_TOKENS, output != pb.OUTPUT_TEXT


def renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Return the error in the words of this interface, which has one field where HTTP's chats have two."""
    if error.param == "top_logprobs":
        return InvalidRequestError(str(error).replace("top_logprobs", "logprobs"), "logprobs", error.code)
    return error


def _flat(request: pb.GenerateRequest | pb.ChatRequest) -> Fields:
    """The request's own fields and those of `sampling` beside each other."""
    fields = _scalars(request)
    for nested in ("sampling", "output", "messages", "tools", "tool_choice", "chat_template_kwargs"):
        fields.pop(nested, None)
    sampling = _scalars(request.sampling)
    if "structured_outputs" in sampling:
        sampling["structured_outputs"] = _structured(request.sampling.structured_outputs)
    return fields | sampling


def _scalars(message: Message) -> Fields:
    """The fields that are set: lists and maps as Python's own, messages as they are."""
    return {descriptor.name: _plain(value) for descriptor, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str | bytes | Message | int | float) else list(value)


def _structured(wanted: pb.StructuredOutputs) -> Fields:
    kind = wanted.WhichOneof("constraint")
    if kind is None:
        return {}
    return {kind: list(wanted.choice.choices) if kind == "choice" else getattr(wanted, kind)}


def _message(message: pb.Message) -> Fields:
    fields = _scalars(message)
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in message.tool_calls
        ]
    return fields


def _tool(tool: pb.Tool, param: str) -> Fields:
    function = _scalars(tool)
    if "parameters" in function:
        function["parameters"] = _json(tool.parameters, param)
    return {"type": "function", "function": function}


def _json(text: str, param: str) -> Any:
    """Read it as HTTP's bodies are read, which hold no half of a surrogate pair and are nested so deep at most."""
    try:
        return from_json(text)
    except ValueError:
        raise InvalidRequestError(f"{param} must be the text of a JSON schema", param, "invalid_json") from None


def _tool_choice(choice: pb.ToolChoice) -> Any:
    if choice.WhichOneof("choice") == "function":
        return {"type": "function", "function": {"name": choice.function}}
    return choice.mode


def _unknown_bytes(message: Message) -> int:
    """Return the bytes of all fields that are not known here, wherever they are. Makes no object for any."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return message.ByteSize() - known.ByteSize()


def _refuse_unknown(message: Message, path: str) -> None:
    """Fields of a newer interface must not be dropped in silence."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        where = path.rstrip(".") or message.DESCRIPTOR.name
        number = unknown[0].field_number
        raise InvalidRequestError(
            f"{where} has a field number {number} that this server does not know; it may be older than your client",
            f"{path}{number}",
            "unknown_parameter",
        )
    for name, parts in _parts(message):
        for part, place in parts:
            _refuse_unknown(part, f"{path}{name}{place}.")


def _check_counts(message: Message, path: str, before: int) -> int:
    """Return how many parts there are with those `before`; raises `InvalidRequestError` for too many.

    Empty messages take two bytes each: millions of them fit into a request, and each costs a Python object.
    """
    for descriptor, value in message.ListFields():
        if not _holds_messages(descriptor):
            continue
        name = f"{path}{descriptor.name}"
        if isinstance(value, Message):
            before = _check_counts(value, f"{name}.", before)
            continue
        before += len(value)
        if len(value) > MAX_PARTS:
            raise InvalidRequestError(f"{name} must hold at most {MAX_PARTS} entries, not {len(value)}", name)
        if before > MAX_ALL_PARTS:
            raise InvalidRequestError(f"{name} must hold fewer entries: a request has {MAX_ALL_PARTS} at most", name)
        for i, part in enumerate(value):
            before = _check_counts(part, f"{name}[{i}].", before)
    return before


def _parts(message: Message) -> Iterator[tuple[str, Iterable[tuple[Message, str]]]]:
    """Yield the fields that hold messages, with these and their places in lists."""
    for descriptor, value in message.ListFields():
        if _holds_messages(descriptor):
            one = isinstance(value, Message)
            yield descriptor.name, [(value, "")] if one else [(part, f"[{i}]") for i, part in enumerate(value)]


def _holds_messages(descriptor: Any) -> bool:
    return descriptor.message_type is not None and not descriptor.message_type.GetOptions().map_entry


class Responses(ABC):
    """Makes the responses of one call. Deltas of a choice must come in order. text / tokens: what is returned."""

    def __init__(self, call: Call, tokenizer: Tokenizer, text: bool, tokens: bool) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._text = text
        self._tokens = tokens

    @abstractmethod
    def first(self) -> Message:
        """Return the response that names the request."""

    @abstractmethod
    def delta(self, delta: Delta) -> Message | None:
        """Return the response for one delta, None when there is nothing to show yet."""

    @abstractmethod
    def last(self, usage: TokenUsage) -> Message:
        """Return the response with the usage of the call."""

    def _ids(self, delta: Delta) -> Sequence[int]:
        return delta.token_ids if self._tokens else ()

    def _shows_nothing(self, delta: Delta, text: str) -> bool:
        """Tokens that end within a character give no text yet."""
        return not text and not delta.logprobs and not self._tokens and delta.finish_reason is None

    def _logprobs(self, placed: Sequence[PlacedLogprob]) -> list[pb.TokenLogprob]:
        top = self._call.params.num_told
        return [
            pb.TokenLogprob(
                token_id=one.logprob.token_id,
                logprob=one.logprob.logprob,
                token=self._tokenizer.token_bytes(one.logprob.token_id),
                top=[
                    pb.TopLogprob(token_id=token, logprob=value, token=self._tokenizer.token_bytes(token))
                    for token, value in one.logprob.top[:top]
                ],
            )
            for one in placed
        ]


class GenerateResponses(Responses):
    """Of `Generate`."""

    def first(self) -> pb.GenerateResponse:
        """See `Responses.first`."""
        return pb.GenerateResponse(request_id=self._call.request_id)

    def delta(self, delta: Delta) -> pb.GenerateResponse | None:
        """See `Responses.delta`."""
        text = delta.text if self._text else ""
        if self._shows_nothing(delta, text):
            return None
        one = pb.GenerateDelta(
            choice=delta.choice,
            text=text,
            token_ids=self._ids(delta),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=_REASONS[delta.finish_reason],
        )
        return pb.GenerateResponse(deltas=[one])

    def last(self, usage: TokenUsage) -> pb.GenerateResponse:
        """See `Responses.last`."""
        return pb.GenerateResponse(usage=usage_message(usage))


class ChatResponses(Responses):
    """Of `Chat`."""

    def first(self) -> pb.ChatResponse:
        """See `Responses.first`."""
        return pb.ChatResponse(request_id=self._call.request_id)

    def delta(self, delta: Delta) -> pb.ChatResponse | None:
        """See `Responses.delta`."""
        content = delta.text if self._text else ""
        reasoning = delta.reasoning if self._text else ""
        if not delta.calls and self._shows_nothing(delta, content or reasoning):
            return None
        one = pb.ChatDelta(
            choice=delta.choice,
            content=content,
            reasoning_content=reasoning,
            tool_calls=[
                pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
                for call in delta.calls
            ],
            token_ids=self._ids(delta),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=_REASONS[delta.finish_reason],
        )
        return pb.ChatResponse(deltas=[one])

    def last(self, usage: TokenUsage) -> pb.ChatResponse:
        """See `Responses.last`."""
        return pb.ChatResponse(usage=usage_message(usage))


def usage_message(usage: TokenUsage) -> pb.Usage:
    """Return the usage of a call."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
