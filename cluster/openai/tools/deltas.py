"""What a parser finds in a model's text: content, and calls in the pieces in which OpenAI's streams have them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class CallDelta:
    """What is new in one call. `id` and `name` come with its first delta only, the arguments piece by piece.

    arguments: JSON text as the model wrote it; the pieces of one call join to one object, unless the output ended
    within it or the model wrote no valid JSON.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What is new in one choice: content to show, then calls."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class WholeCall:
    """One call of an answer that is not streamed."""

    id: str
    name: str
    arguments: str


def merged(calls: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """Return what is new in each call as one piece, in the order of the calls; the deltas are taken over."""
    found: list[CallDelta] = []
    for call in calls:
        if found and found[-1].index == call.index:
            found[-1].arguments += call.arguments
        else:
            found.append(call)
    return tuple(found)


def joined(parts: Iterable[Parsed]) -> tuple[str, list[WholeCall]]:
    """Return the content and the calls of a whole answer, from its deltas in order."""
    content: list[str] = []
    heads: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for part in parts:
        content.append(part.content)
        for call in part.calls:
            if call.id is not None and call.name is not None:
                heads.append((call.id, call.name))
                arguments.append([])
            arguments[call.index].append(call.arguments)
    calls = [WholeCall(*head, "".join(text)) for head, text in zip(heads, arguments, strict=True)]
    return "".join(content), calls
