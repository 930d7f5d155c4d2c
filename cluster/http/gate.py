"""What every request passes before any route sees it: an id, the key, the tenant's limits, one count per answer."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.admission.deadline import HEADER, before_the_proxy, timeout_of
from cluster.admission.keys import OPEN, Tenant, as_bearer
from cluster.admission.quotas import RateState, RateStates
from cluster.admission.tenants import Tenancy, Visit
from cluster.answer_log import ANSWER_LOG, AnswerLog, NoLog
from cluster.client_id import SERVERS_NAME, SESSION_HEADER, checked_session, is_client_id
from cluster.error_forms import MESSAGES_FORM, OPENAI_FORM, ErrorForm, form_of
from cluster.errors import ApiError
from cluster.http.asgi import Answer
from cluster.http.sites import Sites, answer_preflight, is_preflight, shared_with_pages
from cluster.openai.fields import IGNORED_HEADER
from cluster.telemetry.logs import about
from cluster.telemetry.metrics import Metrics
from cluster.token_source import CallContext

if TYPE_CHECKING:
    from cluster.telemetry.tracing.call_trace import CallTrace

OPEN_PATHS = frozenset({"/health", "/ping"})
SCRAPED_PATHS = frozenset({"/metrics", "/ready"})  # all that a key for scraping opens
PAGES = frozenset({"/ui", "/docs"})  # where a browser goes, which asks its user for the key when the answer says how
_ASK_THE_USER = (b"www-authenticate", b'Basic realm="Squadron: the API key as password", charset="UTF-8"')
KEY_HEADER = "x-api-key"  # as Anthropic's clients send keys; `Authorization` goes first
log = logging.getLogger(__name__)


class Gate:
    """ASGI middleware around all routes; all but `OPEN_PATHS` need a key where there are any.

    `scope["state"]["exchange"]` holds `id` (made here; a generation sets its own, which its answer shows),
    `client_id` (what the client sent as `x-request-id`: only echoed and logged, "" when unfit for either),
    `tenant` (a name) and, once they are known, `model` (the id) and `error` (the code of the answer that is one),
    `ignored` (fields of the request, as `x-squadron-ignored` names them) and `trace_id` where it is traced;
    `scope["state"]["tenant"]` is the `Tenant`.
    names_answers: whether answers get `x-request-id` here; where the carrier of the app sets it, they get
    `SERVERS_NAME`, by which `RouterLossGuard` puts it right.
    Every POST is a request that counts: `scope["state"]["visit"]` is its `Visit`, open until the answer is complete.
    sites: of which sites pages may use the server, and under which names; None = as on loopback.
    """

    def __init__(
        self,
        app: Starlette,
        metrics: Metrics,
        tenancy: Tenancy,
        names_answers: bool = True,
        sites: Sites | None = None,
    ) -> None:
        self._app = app
        self._sites = sites or Sites(keyed=tenancy.keyed)
        self._names_answers = names_answers
        self._known = frozenset(r.path for r in app.routes if isinstance(r, Route) and not r.param_convertors)
        self._metrics = metrics
        self._tenancy = tenancy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it (ASGI)."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # refused before it is accepted
            return
        headers = Headers(scope=scope)
        exchange = {"id": f"req-{secrets.token_hex(16)}", "client_id": _fit(headers.get("x-request-id", ""))}
        state: dict[str, Any] = scope.setdefault("state", {})
        state["exchange"] = exchange
        trace: CallTrace | None = state.get("trace")
        if trace is not None:
            exchange["trace_id"] = trace.trace_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = [self._name(exchange)]
                if ignored := exchange.get("ignored"):
                    named.append((IGNORED_HEADER.encode(), ignored.encode()))
                if form_of(scope) is MESSAGES_FORM:
                    named.append((b"request-id", exchange["id"].encode()))
                named += shared_with_pages(self._sites, headers)
                message["headers"] = [*message.get("headers", ()), *named, *await self._rates(scope)]
                self._metrics.answered(self._route_label(scope), message["status"], exchange.get("model", ""))
            await send(message)

        try:
            if is_preflight(scope, headers):
                await answer_preflight(self._sites, headers, send_named)
                return
            if raw_path(scope) not in OPEN_PATHS:
                self._sites.check(scope, headers, page=raw_path(scope) in PAGES)
            tenant = state["tenant"] = self._tenant(scope, headers)
            exchange["tenant"] = tenant.name
            log: AnswerLog = state.setdefault(ANSWER_LOG, NoLog())
            visit = await self._visit(tenant, headers, trace, log) if scope["method"] == "POST" else None
        except ApiError as error:
            asks = error.code == "invalid_api_key" and raw_path(scope) in PAGES
            await _refuse(error, exchange, send_named, form_of(scope), [_ASK_THE_USER] if asks else [])
            return
        if visit is None:
            await self._app(scope, receive, send_named)
            return
        async with visit:
            state["visit"] = visit
            await self._app(scope, receive, send_named)

    def _name(self, exchange: dict[str, str]) -> tuple[bytes, bytes]:
        """The header that names the request; a carrier that sets its own is put right by the guard before it."""
        if not self._names_answers:
            return SERVERS_NAME.encode(), exchange["id"].encode()
        return b"x-request-id", (exchange["client_id"] or exchange["id"]).encode()

    async def _visit(self, tenant: Tenant, headers: Headers, trace: CallTrace | None, log: AnswerLog) -> Visit:
        seconds = timeout_of(headers.getlist(HEADER))
        left = None if seconds is None else before_the_proxy(seconds) - log.elapsed
        deadline = None if left is None else asyncio.get_running_loop().time() + left
        session = checked_session(headers.get(SESSION_HEADER, ""))
        context = CallContext(session, fingerprint=log.fingerprint, continues=log.continues, trace=trace)
        return await self._tenancy.visit(tenant, deadline, context, charged=log.facts is not None, log=log)

    def _tenant(self, scope: Scope, headers: Headers) -> Tenant:
        if raw_path(scope) in OPEN_PATHS:
            return OPEN
        given = headers.get("authorization", "")
        if not given and (key := headers.get(KEY_HEADER)) is not None:
            given = f"Bearer {key}"
        # What a browser adds by itself counts only on the way to a page and from it: other sites' pages could have
        # it sent as well. Source: W3C Fetch Metadata, which all browsers of today send and no page can forge.
        if raw_path(scope) in PAGES or headers.get("sec-fetch-site") == "same-origin":
            given = as_bearer(given)
        tenant = self._tenancy.tenant_of(given)
        if tenant.scrapes and raw_path(scope) not in SCRAPED_PATHS:
            message = (
                f"this key reads figures alone: it opens {' and '.join(sorted(SCRAPED_PATHS))}; use a tenant's key"
            )
            raise ApiError("permission_denied", message)
        return tenant

    def _route_label(self, scope: Scope) -> str:
        """The route of a path without parameters: clients must not be able to make up labels."""
        path = raw_path(scope)
        return path if path in self._known else "other"

    async def _rates(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The headers of the tenant's limits, on answers to what counts towards them."""
        tenant: Tenant | None = scope["state"].get("tenant")
        if tenant is None or scope["method"] != "POST":
            return []
        return rate_headers(await self._tenancy.quotas.states(tenant))


async def _refuse(
    error: ApiError,
    exchange: dict[str, str],
    send: Send,
    form: ErrorForm = OPENAI_FORM,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    error.request_id, exchange["error"] = exchange["id"], error.code
    tenant = exchange.get("tenant", "unknown")
    told = exchange["id"], tenant, error.code
    log.info("request %s of tenant %s: refused at the door: %s", *told, extra=about(exchange))
    await Answer(send, form).error(error, headers)


class RootPath:
    """ASGI middleware around all others: the routes are below a prefix, too, as with uvicorn's `--root-path`.

    prefix: such as /llm, without a slash at its end; None = there is none.
    """

    def __init__(self, app: ASGIApp, prefix: str | None) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one exchange on (ASGI)."""
        if self._prefix is not None and scope["type"] == "http" and raw_path(scope).startswith(f"{self._prefix}/"):
            scope["root_path"] = scope.get("root_path", "") + self._prefix
        await self._app(scope, receive, send)


def raw_path(scope: Scope) -> str:
    """The raw path below the mount point, exactly as routing sees it."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _fit(client_id: str) -> str:
    return client_id if is_client_id(client_id) else ""


def rate_headers(rates: RateStates) -> list[tuple[bytes, bytes]]:
    """Return limit, remaining and reset for the limits that the tenant has; source: OpenAI's rate limit guide."""
    headers: list[tuple[bytes, bytes]] = []
    for kind, state in (("requests", rates.requests), ("tokens", rates.tokens)):
        if state is not None:
            headers += _rate_headers(kind, state)
    return headers


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: `0s`, `20ms`, `7.66s`, `2m59.5s`."""
    if seconds < 1:
        millis = math.ceil(seconds * 1000)
        return f"{millis}ms" if millis else "0s"
    hundredths = math.ceil(seconds * 100)
    minutes, rest = divmod(hundredths, 6000)
    return f"{minutes}m{rest / 100:g}s" if minutes else f"{rest / 100:g}s"


def _rate_headers(kind: str, state: RateState) -> list[tuple[bytes, bytes]]:
    values = {"limit": str(state.limit), "remaining": str(state.remaining), "reset": duration(state.reset)}
    return [(f"x-ratelimit-{name}-{kind}".encode(), value.encode()) for name, value in values.items()]
