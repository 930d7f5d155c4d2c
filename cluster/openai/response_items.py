"""The items of a response as they grow: what the model says, what it thinks, the functions that it calls.

Source: OpenAI API reference, "streaming events" of responses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from msgspec import DecodeError, Raw, json
from typing_extensions import override

from cluster.openai.choices import PlacedLogprob
from cluster.openai.parsers.reader import CallDelta

Emit = Callable[..., None]
Logprobs = Callable[[Sequence[PlacedLogprob]], list[Raw]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item stands: in which response, as the how manyth; emit: where its events go."""

    emit: Emit
    index: int
    response_id: str

    def item_id(self, prefix: str) -> str:
        """Return an id that nobody guesses who does not know the response's, and that another router makes again."""
        name = f"{self.response_id}/{self.index}".encode()
        return f"{prefix}_{blake2b(name, digest_size=16).hexdigest()}"


class OpenItem(ABC):
    """One item while it grows; `item` is its body so far. Every change is emitted as it is made."""

    prefix: str

    def __init__(self, place: Place) -> None:
        self.id = place.item_id(self.prefix)
        self.item: dict[str, Any] = {"id": self.id, "status": "in_progress"}
        self._emit = place.emit
        self._index = place.index

    def close(self, cut: bool) -> None:
        """Complete the item. cut: the output reached its limit in it."""
        self._finish()
        self.item["status"] = "incomplete" if cut and not self._whole else "completed"
        self._emit_event("response.output_item.done", item=self.item)

    @property
    def _whole(self) -> bool:
        """Whether nothing of the item can be missing although the output was cut."""
        return False

    @abstractmethod
    def _finish(self) -> None: ...

    def _emit_event(self, event: str, **fields: Any) -> None:
        self._emit(event, output_index=self._index, **fields)

    def _emit_part(self, event: str, **fields: Any) -> None:
        self._emit(event, item_id=self.id, output_index=self._index, **fields)


class TextItem(OpenItem):
    """An item with one part of text: what the model says, or what it thinks."""

    part: dict[str, Any]
    name: str

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._texts: list[str] = []
        self.item |= self._head()
        self._emit_event("response.output_item.added", item={**self.item, "content": []})
        self._emit_part("response.content_part.added", content_index=0, part=self._part(""))

    @abstractmethod
    def _head(self) -> dict[str, Any]:
        """What the item says beside its content."""

    @abstractmethod
    def _part(self, text: str) -> dict[str, Any]:
        """The part with its text."""

    def _extras(self) -> dict[str, Any]:
        """What the event of the whole text says beside the text."""
        return {}

    def _finish(self) -> None:
        text = "".join(self._texts)
        part = self._part(text)
        self._emit_part(f"response.{self.name}.done", content_index=0, text=text, **self._extras())
        self._emit_part("response.content_part.done", content_index=0, part=part)
        self.item["content"] = [part]


class MessageItem(TextItem):
    """What the model says."""

    prefix = "msg"
    name = "output_text"

    def __init__(self, place: Place, logprobs: Logprobs) -> None:
        self._entries: list[Raw] = []
        self._logprobs = logprobs
        super().__init__(place)

    def add(self, text: str, placed: Sequence[PlacedLogprob]) -> None:
        """Add text, and the log-probabilities of its tokens where they are wanted."""
        entries = self._logprobs(placed) if placed else []
        self._texts.append(text)
        self._entries += entries
        self._emit_part("response.output_text.delta", content_index=0, delta=text, logprobs=entries)

    def _head(self) -> dict[str, Any]:
        return {"type": "message", "role": "assistant"}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._entries)}

    def _extras(self) -> dict[str, Any]:
        return {"logprobs": list(self._entries)}


class ReasoningItem(TextItem):
    """What the model thinks."""

    prefix = "rs"
    name = "reasoning_text"

    def add(self, text: str) -> None:
        """Add text."""
        self._texts.append(text)
        self._emit_part("response.reasoning_text.delta", content_index=0, delta=text)

    def _head(self) -> dict[str, Any]:
        return {"type": "reasoning", "summary": []}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class CallItem(OpenItem):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, place: Place, call: CallDelta) -> None:
        super().__init__(place)
        self.number = call.index
        self._arguments: list[str] = []
        self.item |= {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        self._emit_event("response.output_item.added", item=dict(self.item))

    def add(self, arguments: str) -> None:
        """Add a piece of the arguments."""
        self._arguments.append(arguments)
        self._emit_part("response.function_call_arguments.delta", delta=arguments)

    @property
    @override
    def _whole(self) -> bool:
        try:
            json.decode(self.item["arguments"])
        except DecodeError:
            return False
        return True

    def _finish(self) -> None:
        self.item["arguments"] = "".join(self._arguments)
        self._emit_part(
            "response.function_call_arguments.done", name=self.item["name"], arguments=self.item["arguments"]
        )
