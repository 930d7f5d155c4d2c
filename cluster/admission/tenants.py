"""The door that every ingress goes through: who calls, whether they may now, and whose turn it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import TracebackType
from typing import Self

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.keys import OPEN, KeySource, Tenant, bearer_key
from cluster.admission.quotas import Quotas
from cluster.answer_log import AnswerLog, NoLog
from cluster.errors import ApiError
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from engine.request import Request


@dataclass(slots=True)
class TenantCounts:
    """What one tenant has done with one model since the router started.

    requests: what the door said -> requests that have ended. taken_back: of the prompts charged, those that another
    router charges as well, and that the next ones are not counted for: who reads a counter takes one that falls for
    a new one.

    The door says "admitted", or the code of the `ApiError` with which it refused: "rate_limit_exceeded", for one.
    """

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    taken_back: int = 0

    def charge_prompt(self, tokens: int) -> None:
        """Count the tokens of prompts that are charged."""
        known = min(tokens, self.taken_back)
        self.taken_back -= known
        self.prompt_tokens += tokens - known

    def add(self, other: TenantCounts) -> None:
        """Add another's metrics to these."""
        self.requests.update(other.requests)
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.taken_back += other.taken_back


class Tenancy:
    """Keys and quotas of one router, over all its models. keys: None = a server open to everybody, all of one tenant.

    An ingress asks `tenant_of` whose key it was given, opens a `visit` for each request that costs something, tells
    it which model is asked and what the prompts cost, and takes tokens from the visit's `source` alone.
    counts: (model, tenant) -> what the tenant did there; "" stands for no model, of requests that never got to one.
    """

    def __init__(self, keys: KeySource | None = None, quotas: Quotas | None = None) -> None:
        self.quotas = quotas or Quotas()
        self.counts: dict[tuple[str, str], TenantCounts] = {}
        self._keys = keys

    @property
    def keyed(self) -> bool:
        """Whether callers need a key."""
        return self._keys is not None

    def tenant_of(self, authorization: str) -> Tenant:
        """Return who calls, from the value of `authorization` ("" = none); raises `ApiError` (`invalid_api_key`)."""
        if self._keys is None:
            return OPEN
        return self._keys.ring.tenant_of(bearer_key(authorization))

    def holder(self, name: str) -> Tenant:
        """Return the tenant of this name; one without quotas where no key of it is valid any more."""
        if self._keys is None:
            return OPEN
        return self._keys.ring.holder(name) or Tenant(name)

    async def watch(self) -> None:
        """Keep the keys up to date until cancelled."""
        if self._keys is not None:
            await self._keys.watch()

    async def visit(
        self,
        tenant: Tenant,
        deadline: float | None = None,
        context: CallContext = NO_CONTEXT,
        charged: bool = False,
        log: AnswerLog | None = None,
    ) -> Visit:
        """Let one request in, which must be closed; raises `ApiError` (`rate_limit_exceeded`).

        deadline: when it ends at the latest, on the event loop's clock; None = it takes as long as it takes.
        context: goes with all that is taken from the visit's source. charged: its prompt was, at a router that is
        lost. log: of the answer, by which another router would go on with it; None = none would.
        """
        try:
            await self.quotas.enter(tenant, context.continues)
        except ApiError as error:
            self.counts_of("", tenant).requests[error.code] += 1
            raise
        return Visit(self, tenant, deadline, context, charged, log)

    def counts_of(self, model: str, tenant: Tenant) -> TenantCounts:
        """Return the tenant's metrics with a model, which may be added to."""
        counts = self.counts.get((model, tenant.name))
        if counts is None:
            counts = self.counts[model, tenant.name] = TenantCounts()
        return counts


class Visit:
    """One request of a tenant from the door to its end: `async with await tenancy.visit(tenant) as visit`.

    It is charged once, over all routers that have it one after the other: the prompt by the first that has told of
    it, the rest by the one that ends it. One that was silent for so long that its ingress may have left it charges
    only for an answer which it has sent to its end.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        tenant: Tenant,
        deadline: float | None = None,
        context: CallContext = NO_CONTEXT,
        charged: bool = False,
        log: AnswerLog | None = None,
    ) -> None:
        self.tenant = tenant
        self.deadline = deadline
        self.context = context
        self._tenancy = tenancy
        self._model = ""
        self._admission: AdmissionQueue | None = None
        self._charged = charged
        self._log = log or NoLog()
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._outlives_door = False
        self._outcome = "admitted"
        self._gave_up = self._prompt_elsewhere = False
        self._left = False
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._outlives_door:
            await self.close()

    def outlive(self) -> None:
        """Have whoever called this close the visit, later than the block ends that it was opened for.

        It goes on with the answer here, whichever router the ingress asks for it.
        """
        self._outlives_door = True
        self._log = NoLog()

    def give_up(self, prompt: bool) -> None:
        """Charge nothing at the end: another router has the answer, and charges for it. prompt: for that as well."""
        self._gave_up, self._prompt_elsewhere = True, prompt

    def ask(self, model: str, admission: AdmissionQueue) -> None:
        """Note which model is asked, before anything is charged. admission: the queue of the model's."""
        self._model = model
        self._admission = admission
        if self.context.trace is not None:
            self.context.trace.model = model

    @property
    def source(self) -> TokenSource:
        """Where the tokens of the model come from; raises `RuntimeError` before `ask`."""
        return _TenantSource(self._asked, self.tenant, self.deadline, self.context)

    async def charge_prompt(self, tokens: int) -> None:
        """Charge the tokens of all prompts, before anything is generated.

        Raises `ApiError`: `prompt_exceeds_quota` (400) when they can never fit, `rate_limit_exceeded` otherwise.
        """
        if self._charged:
            return
        try:
            await self._tenancy.quotas.use_prompt(self.tenant, tokens)
        except ApiError as error:
            self._outcome = error.code
            self._log.withdraw()
            raise
        self._prompt_tokens = tokens
        self._counts.charge_prompt(tokens)

    def charge_output(self, tokens: int) -> None:
        """Note generated tokens once for each choice that ends; they are charged when the visit is closed."""
        self._output_tokens += tokens
        self._asked.charge(self.tenant.name, tokens)

    def leave(self) -> None:
        """Count as running no more, whatever is still to be charged; can be called twice."""
        if not self._left:
            self._left = True
            self._tenancy.quotas.leave(self.tenant)

    async def close(self) -> None:
        """End the request; can be called twice."""
        if self._closed:
            return
        self._closed = True
        self.leave()
        if self._log.may_be_elsewhere:
            self.give_up(prompt=not self._log.told_facts)
        if self._prompt_elsewhere and self._prompt_tokens:
            self._counts.taken_back += self._prompt_tokens
            await self._tenancy.quotas.use_output(self.tenant, -self._prompt_tokens)
        if self._gave_up:
            return
        self._counts.requests[self._outcome] += 1
        self._counts.output_tokens += self._output_tokens
        await self._tenancy.quotas.use_output(self.tenant, self._output_tokens)

    @property
    def _asked(self) -> AdmissionQueue:
        if self._admission is None:
            raise RuntimeError("the visit was not told which model is asked")
        return self._admission

    @property
    def _counts(self) -> TenantCounts:
        return self._tenancy.counts_of(self._model, self.tenant)


class _TenantSource:
    """The token source as one visit sees it: behind the queue, with the tenant's prefix cache and one deadline."""

    def __init__(self, queue: AdmissionQueue, tenant: Tenant, deadline: float | None, context: CallContext) -> None:
        self._queue = queue
        self._tenant = tenant
        self._deadline = deadline
        self._context = context

    def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Run a request when it is the tenant's turn; see `TokenSource.generate`.

        The context is the visit's; of the given one its fingerprint counts, where it has one.
        """
        salt = tenant_salt(self._tenant, request.cache_salt)
        given = replace(self._context, fingerprint=context.fingerprint or self._context.fingerprint)
        own = replace(request, cache_salt=salt, deadline=self._deadline, tenant=self._tenant.name)
        return self._queue.generate(self._tenant.name, own, given)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice."""
        self._queue.source.finish_choice(request_id, choice)


def tenant_salt(tenant: Tenant, client_salt: bytes) -> bytes:
    """Return the salt of the prefix cache for what a client of `tenant` sends as its own, b"" = none.

    Tenants never share blocks: the tenant's name, which no client chooses, keys the hash of the salt that they do.
    All routers come to the same salt, so that each finds the blocks that a request through another left.
    """
    if tenant.shares_cache:
        return client_salt
    key = blake2b(tenant.name.encode(), person=b"sqd-tenant").digest()
    return blake2b(client_salt, digest_size=32, key=key, person=b"sqd-cache-salt").digest()
