"""One page of a list, whose ids are in the order of their making: no more is read than it takes to fill the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

READ_AT_ONCE = 256
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """Which page. after: the id before its first, "" = from the beginning; it need not be there any more."""

    limit: int
    after: str = ""
    oldest_first: bool = False


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """has_more: whether the list goes on."""

    items: Sequence[T]
    has_more: bool


def page_of(ids: Iterable[str], asked: Asked, read: Callable[[Sequence[str]], Iterable[T | None]]) -> Page[T]:
    """Return a page of what `read` makes of ids; None = it is not to be listed."""
    found: list[T] = []
    rest = _from(sorted(ids, reverse=not asked.oldest_first), asked)
    start = 0
    while start < len(rest) and len(found) <= asked.limit:
        end = start + min(READ_AT_ONCE, asked.limit + 1 - len(found))
        found += [one for one in read(rest[start:end]) if one is not None]
        start = end
    return Page(found[: asked.limit], len(found) > asked.limit)


def _from(ids: list[str], asked: Asked) -> list[str]:
    if not asked.after:
        return ids
    return [one for one in ids if (one > asked.after if asked.oldest_first else one < asked.after)]
