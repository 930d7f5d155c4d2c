"""API keys and the tenants who hold them.

Only hashes of keys are held, and finding one takes the same time whatever was given.
"""

from __future__ import annotations

import hmac
import secrets
import time
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from typing import Protocol

from cluster.errors import ApiError

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may use; None = no limit.

    requests_per_minute / tokens_per_minute: over a sliding minute; tokens of prompts and of what was generated.
    max_concurrent: requests that run or wait at one time, on each router; rows of batches do not count.
    max_stored_bytes: of all files at `/v1/files`, those that batches leave included.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_stored_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """Everybody who holds one of its keys. `name` is fit for logs, labels and metrics.

    shares_cache: the prefix cache is separated by the clients' own salts alone: for a server with no keys.
    sees_all: an operator's key: shows all metrics, and what requests of other tenants waited for.
    scrapes: the key reads metrics, of all, and does nothing else.
    """

    name: str
    quota: Quota = field(default_factory=Quota)
    shares_cache: bool = False
    sees_all: bool = False
    scrapes: bool = False

    @property
    def sees_metrics(self) -> bool:
        """Whether the key is shown the metrics of all tenants and of the replicas."""
        return self.sees_all or self.scrapes


OPEN = Tenant(DEFAULT_TENANT, shares_cache=True, sees_all=True)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key. digest: SHA-256 of the key [32 bytes]. expires: seconds since the epoch, None = never.

    A fast hash is enough for keys of 128 random bits and more, which cannot be guessed; it is not for passwords.
    """

    digest: bytes
    tenant: Tenant
    expires: float | None = None


def hash_key(key: str) -> bytes:
    """Return the digest under which a key is known: SHA-256 of its UTF-8 text."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def admin_entry(key: str) -> KeyEntry:
    """Return the entry of `--api-key`, which the operator has chosen."""
    return KeyEntry(hash_key(key), Tenant(DEFAULT_TENANT, sees_all=True))


def scrape_entry(key: str) -> KeyEntry:
    """Return the entry of `--metrics-key`."""
    return KeyEntry(hash_key(key), Tenant("metrics", scrapes=True))


def new_key() -> str:
    """Return a new random key: 256 bits from the operating system, as `sk-sqd-` and 43 letters, digits, - and _."""
    return "sk-sqd-" + secrets.token_urlsafe(32)


class KeyRing:
    """Finds the tenant of a key. Never changes: another set of keys is another ring.

    Places in the table depend on a secret of this process and full digests are compared in constant time, so that
    the time of an answer reveals nothing about any key.
    """

    def __init__(self, entries: Iterable[KeyEntry], clock: Callable[[], float] = time.time) -> None:
        self._secret = secrets.token_bytes(32)
        self._clock = clock
        self._entries = {self._place(entry.digest): entry for entry in entries}
        self._nobody = KeyEntry(secrets.token_bytes(32), Tenant("nobody"))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tenants(self) -> list[Tenant]:
        """The tenants that have a key, each once, by name."""
        return sorted({entry.tenant.name: entry.tenant for entry in self._entries.values()}.values(), key=_by_name)

    def tenant_of(self, key: str) -> Tenant:
        """Return the tenant that holds `key`; raises `ApiError` (`invalid_api_key`) for an unknown or expired one."""
        digest = hash_key(key)
        entry = self._entries.get(self._place(digest), self._nobody)
        if not hmac.compare_digest(entry.digest, digest):
            found = "Incorrect API key provided: it is not known here" if key else "no API key was sent"
            raise ApiError("invalid_api_key", f"{found}; give one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        if entry.expires is not None and entry.expires <= self._clock():
            when = datetime.fromtimestamp(entry.expires, UTC).isoformat(timespec="seconds")
            raise ApiError("invalid_api_key", f"this API key expired at {when}")
        return entry.tenant

    def holder(self, name: str) -> Tenant | None:
        """Return the tenant of this name, None where no key of it is valid (any more)."""
        now = self._clock()
        valid = [one.tenant for one in self._entries.values() if one.expires is None or one.expires > now]
        return next((one for one in valid if one.name == name), None)

    def _place(self, digest: bytes) -> bytes:
        return blake2b(digest, digest_size=16, key=self._secret).digest()


class KeySource(Protocol):
    """Where the keys of the moment come from."""

    @property
    def ring(self) -> KeyRing:
        """The keys that are valid now."""
        ...

    async def watch(self) -> None:
        """Keep `ring` up to date until cancelled."""
        ...


class FixedKeys:
    """Keys that do not change: those of flags."""

    def __init__(self, ring: KeyRing) -> None:
        self.ring = ring

    @classmethod
    def one(cls, key: str) -> FixedKeys:
        """Return one key, of the default tenant, without quota or expiry, which sees all."""
        return cls(KeyRing([admin_entry(key)]))

    async def watch(self) -> None:
        """There is nothing to watch."""


def bearer_key(authorization: str) -> str:
    """Return the key in the value of an `Authorization` header or metadata field, "" when there is none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def as_bearer(authorization: str) -> str:
    """Return `Basic` credentials, whose password is the key, in the `Bearer` form; anything else as it is."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, password = b64decode(encoded.strip(), validate=True).decode().partition(":")
    except ValueError:
        return ""
    return f"Bearer {password}"


def _by_name(tenant: Tenant) -> str:
    return tenant.name
