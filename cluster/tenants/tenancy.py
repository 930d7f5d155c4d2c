"""The door that every ingress goes through: who calls, whether they may now, and whose turn it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from cluster.errors import ApiError
from cluster.generation import TokenChunk, TokenSource
from cluster.tenants.fair_gate import UNBOUNDED, FairGate
from cluster.tenants.keys import KeySource, bearer_key
from cluster.tenants.quotas import Quotas
from cluster.tenants.tenant import OPEN, Tenant, tenant_salt
from engine.request import Request


@dataclass(slots=True)
class TenantCounts:
    """What one tenant has done since the router started. requests: what the door said -> requests that have ended.

    The door says "admitted", or the code of the `ApiError` with which it refused: "rate_limit_exceeded", for one.
    """

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0


class Tenancy:
    """Keys, quotas and the fair gate of one router. keys: None = a server open to everybody, all of one tenant.

    An ingress asks `tenant_of` whose key it was given, opens a `visit` for each request that costs something, tells
    it what the prompts cost, and takes tokens from the visit's `source` alone.
    """

    def __init__(self, gate: FairGate, keys: KeySource | None = None, quotas: Quotas | None = None) -> None:
        self.gate = gate
        self.quotas = quotas or Quotas()
        self.counts: dict[str, TenantCounts] = {}
        self._keys = keys

    @classmethod
    def open_to_all(cls, source: TokenSource, keys: KeySource | None = None) -> Tenancy:
        """Return one that lets in as many requests at a time as come."""
        return cls(FairGate(source, lambda: UNBOUNDED), keys)

    def tenant_of(self, authorization: str) -> Tenant:
        """Return who calls, from the value of `authorization` ("" = none); raises `ApiError` (`unauthorized`)."""
        if self._keys is None:
            return OPEN
        return self._keys.ring.tenant_of(bearer_key(authorization))

    async def watch(self) -> None:
        """Keep the keys up to date until cancelled."""
        if self._keys is not None:
            await self._keys.watch()

    async def visit(self, tenant: Tenant, deadline: float | None = None) -> Visit:
        """Let one request in, which must be closed; raises `ApiError` (`rate_limit_exceeded`).

        deadline: when it ends at the latest, on the event loop's clock; None = it takes as long as it takes.
        """
        counts = self.counts_of(tenant)
        try:
            await self.quotas.enter(tenant)
        except ApiError as error:
            counts.requests[error.code] += 1
            raise
        return Visit(self, tenant, counts, deadline)

    def counts_of(self, tenant: Tenant) -> TenantCounts:
        """Return the tenant's figures, which may be added to."""
        counts = self.counts.get(tenant.name)
        if counts is None:
            counts = self.counts[tenant.name] = TenantCounts()
        return counts


class Visit:
    """One request of a tenant from the door to its end: `async with await tenancy.visit(tenant) as visit`."""

    def __init__(self, tenancy: Tenancy, tenant: Tenant, counts: TenantCounts, deadline: float | None = None) -> None:
        self.tenant = tenant
        self.deadline = deadline
        self.source: TokenSource = _TenantSource(tenancy.gate, tenant, deadline)
        self._tenancy = tenancy
        self._counts = counts
        self._output_tokens = 0
        self._outcome = "admitted"
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def charge_prompt(self, tokens: int) -> None:
        """Charge the tokens of all prompts, before anything is generated.

        Raises `ApiError`: `prompt_exceeds_quota` (400) when they can never fit, `rate_limit_exceeded` otherwise.
        """
        try:
            await self._tenancy.quotas.use_prompt(self.tenant, tokens)
        except ApiError as error:
            self._outcome = error.code
            raise
        self._counts.prompt_tokens += tokens

    def charge_output(self, tokens: int) -> None:
        """Note generated tokens once for each choice that ends; the quota is charged when the visit is closed."""
        self._output_tokens += tokens
        self._counts.output_tokens += tokens
        self._tenancy.gate.charge(self.tenant.name, tokens)

    async def close(self) -> None:
        """End the request; can be called twice."""
        if self._closed:
            return
        self._closed = True
        self._counts.requests[self._outcome] += 1
        self._tenancy.quotas.leave(self.tenant)
        await self._tenancy.quotas.use_output(self.tenant, self._output_tokens)


class _TenantSource:
    """The token source as one visit sees it: behind the gate, with the tenant's prefix cache and one deadline."""

    def __init__(self, gate: FairGate, tenant: Tenant, deadline: float | None) -> None:
        self._gate = gate
        self._tenant = tenant
        self._deadline = deadline

    def generate(self, request: Request) -> AsyncIterator[TokenChunk]:
        """Run a request when it is the tenant's turn; see `TokenSource.generate`."""
        salt = tenant_salt(self._tenant, request.cache_salt)
        return self._gate.generate(self._tenant.name, replace(request, cache_salt=salt, deadline=self._deadline))

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice."""
        self._gate.source.finish_choice(request_id, choice)
