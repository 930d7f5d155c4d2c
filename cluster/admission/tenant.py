"""A tenant: a name that shares quotas, a place in the queue and a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

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
    sees_all: whoever holds this key runs the server: all figures, and what requests of other tenants waited for.
    scrapes: the key reads figures, of all, and does nothing else.
    """

    name: str
    quota: Quota = field(default_factory=Quota)
    shares_cache: bool = False
    sees_all: bool = False
    scrapes: bool = False

    @property
    def sees_figures(self) -> bool:
        """Whether the key is shown the figures of all tenants and of the replicas."""
        return self.sees_all or self.scrapes


OPEN = Tenant(DEFAULT_TENANT, shares_cache=True, sees_all=True)


def tenant_salt(tenant: Tenant, client_salt: bytes) -> bytes:
    """Return the salt of the prefix cache for what a client of `tenant` sends as its own, b"" = none.

    Tenants never share blocks: the tenant's name, which no client chooses, keys the hash of the salt that they do.
    All routers come to the same salt, so that each finds the blocks that a request through another left.
    """
    if tenant.shares_cache:
        return client_salt
    key = blake2b(tenant.name.encode(), person=b"sqd-tenant").digest()
    return blake2b(client_salt, digest_size=32, key=key, person=b"sqd-cache-salt").digest()
