"""Ids of files and batches, made in the order of their creation, and pages of lists in that order.

The 32 hex digits are 14 of the time in microseconds, 8 of the tenant, and 10 at random, or of what it comes of. So a
list is in order without a look into anything, and takes no look at what is not the tenant's. Whose something is, is
kept beside it: the digits are a way to find it, and no proof.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

_TIME_DIGITS, _TENANT_DIGITS, _RANDOM_DIGITS = 14, 8, 10
_DIGITS = _TIME_DIGITS + _TENANT_DIGITS + _RANDOM_DIGITS
READ_AT_ONCE = 256
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ids:
    """All ids with one prefix."""

    prefix: str
    _pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pattern", re.compile(re.escape(self.prefix) + "[0-9a-f]{32}"))

    def new(self, tenant: str) -> str:
        """Make one that there never was."""
        micros = time.time_ns() // 1000
        return f"{self.prefix}{micros:0{_TIME_DIGITS}x}{_tag(tenant)}{secrets.token_hex(_RANDOM_DIGITS // 2)}"

    def derived(self, source: str, what: str) -> str:
        """Make the one for `what` comes of another thing: always the same. source: its id, of time and tenant."""
        kept = source[-_DIGITS:][: _TIME_DIGITS + _TENANT_DIGITS]
        own = blake2b(f"{source}:{what}".encode(), digest_size=_RANDOM_DIGITS // 2, person=b"sqd-derived")
        return f"{self.prefix}{kept}{own.hexdigest()}"

    def fits(self, text: str) -> bool:
        """Whether `text` has the form of an id, and so is safe in a path."""
        return self._pattern.fullmatch(text) is not None

    def may_be_of(self, text: str, tenant: str) -> bool:
        """Whether `text` is spelt like one of a tenant's. Few of others' are, too."""
        start = len(self.prefix) + _TIME_DIGITS
        return self.fits(text) and text[start : start + _TENANT_DIGITS] == _tag(tenant)

    def made_at(self, one: str) -> int:
        """Return when an id was made, in seconds since 1970."""
        return int(one[len(self.prefix) :][:_TIME_DIGITS], 16) // 10**6


FILE_IDS = Ids("file-")
BATCH_IDS = Ids("batch_")


def output_ids(batch_id: str) -> tuple[str, str]:
    """Return the ids of a batch's output file and of its error file, whether or not it has such."""
    return FILE_IDS.derived(batch_id, "output"), FILE_IDS.derived(batch_id, "error")


def _tag(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=_TENANT_DIGITS // 2, person=b"sqd-owner").hexdigest()


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which page. after: the id before its first, "" = from the beginning; it need not be there any more."""

    limit: int
    after: str = ""
    oldest_first: bool = False


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """has_more: whether the list goes on."""

    items: Sequence[T]
    has_more: bool


def page_of(ids: Iterable[str], asked: PageQuery, read: Callable[[Sequence[str]], Iterable[T | None]]) -> Page[T]:
    """Return a page of what `read` makes of ids; None = it is not to be listed."""
    found: list[T] = []
    rest = _from(sorted(ids, reverse=not asked.oldest_first), asked)
    start = 0
    while start < len(rest) and len(found) <= asked.limit:
        end = start + min(READ_AT_ONCE, asked.limit + 1 - len(found))
        found += [one for one in read(rest[start:end]) if one is not None]
        start = end
    return Page(found[: asked.limit], len(found) > asked.limit)


def _from(ids: list[str], asked: PageQuery) -> list[str]:
    if not asked.after:
        return ids
    return [one for one in ids if (one > asked.after if asked.oldest_first else one < asked.after)]
