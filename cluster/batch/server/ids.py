"""Ids of files and batches: made here alone, and in the order of their making.

The 32 hex digits are 14 of the time in microseconds, 8 of the tenant, and 10 at random, or of what it comes of. So a
list is in order without a look into anything, and takes no look at what is not the tenant's. Whose something is, is
kept beside it: the digits are a way to find it, and no proof.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from hashlib import blake2b

_TIME_DIGITS, _TENANT_DIGITS, _RANDOM_DIGITS = 14, 8, 10
_DIGITS = _TIME_DIGITS + _TENANT_DIGITS + _RANDOM_DIGITS


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
        """Whether `text` is spelt like one: fit for a path, whoever sent it."""
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
