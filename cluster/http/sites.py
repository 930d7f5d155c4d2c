"""Which names a server goes by, and of which sites pages may use it: a browser lends its visitor's place to any page.

A server without keys trusts whoever reaches it, and a page of any site has its visitor's browser reach what the
visitor can: this machine, the network of an office. So it must be seen in the request that no such page sent it.

- `Host` must be a name that no stranger can point at this server (DNS rebinding): an address, `localhost`, what the
  server was told to listen on or to go by. One that listens for other machines may also be called by names that only
  its own network can give; whoever makes such names is in that network, and needs no browser.
- `Sec-Fetch-Site`, or without it `Origin` beside `Host`, must tell of the server's own pages, of this machine's, or
  of allowed ones. What sends neither is no browser of today.
- A body must have a Content-Type. Browsers send some without asking first (a preflight): those are refused where JSON
  is wanted, and this is the one that is none.

Allowed sites get the headers of CORS.
Source: WHATWG Fetch, W3C Fetch Metadata, and the algorithm of Go's `http.CrossOriginProtection`.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope, Send

from cluster.config_values import ANY, DEFAULT_PORTS, HOST, ORIGIN
from cluster.errors import ApiError

# Names below these are given by a local network, never by the public one. Source: RFC 6762 (local), RFC 8375
# (home.arpa), ICANN's resolution 2024.07.29.06 (internal); lan and svc are custom, of routers and of Kubernetes.
_LOCAL_NETWORKS = (".local", ".internal", ".home.arpa", ".lan", ".svc")
_MOST_SHOWN = 100  # characters of what a client sent
_ANY_SITE = (b"access-control-allow-origin", b"*")
_ALLOWED = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b"authorization, *"),  # which no wildcard stands for
    (b"access-control-max-age", b"600"),
)
_READABLE = (b"access-control-expose-headers", b"*")


@dataclass(frozen=True, slots=True)
class Sites:
    """The configured names of a server, and the sites that it allows.

    keyed: whether it has keys; then names and sites are looked at only where they are given. listens: the address or
    name that it listens on. hosts: names that it goes by beside the usual ones, `*.` before those that stand for all
    below them, or `*`; None = the usual ones. origins: whose pages may use it, such as `https://chat.example.com`,
    or `*`; None = with keys anybody's, without keys those of this machine.
    """

    keyed: bool = False
    listens: str = "127.0.0.1"
    hosts: tuple[str, ...] | None = None
    origins: tuple[str, ...] | None = None

    def check(self, scope: Scope, headers: Headers, page: bool = False) -> None:
        """Raise `ApiError` (403 or 415) for what a page of another site may have had a browser send.

        page: whether the path is of a page, where links of other sites may lead.
        """
        if not self.keyed or self.hosts is not None:
            self._check_host(headers.get("host"))
        if not self.lets_all_in:
            self._check_site(headers, page and _navigates(scope, headers))
        if not self.keyed and "content-type" not in headers and _has_body(headers):
            raise ApiError("unsupported_media_type", "a body needs a Content-Type, such as application/json")

    def lets_in(self, origin: str) -> bool:
        """Whether pages of a site may use the server, and read its answers."""
        if self.origins is None:
            found = ORIGIN.fullmatch(origin.lower())
            return self.keyed or (found is not None and _is_this_machine(_bare(found["name"])))
        return ANY in self.origins or origin.lower() in self.origins

    @property
    def lets_all_in(self) -> bool:
        """Whether pages of all sites may."""
        return self.keyed if self.origins is None else ANY in self.origins

    def _check_host(self, host: str | None) -> None:
        if host is None:  # HTTP/1.0, which no browser speaks
            return
        found = HOST.fullmatch(host.lower())
        name = _bare(found["name"]) if found else ""
        if not self._goes_by(name):
            shown = (name or host)[:_MOST_SHOWN]
            raise ApiError(
                "forbidden_host",
                f"this server does not go by the name {shown!r}; if it should, start it with --allowed-hosts {shown}",
            )

    def _goes_by(self, name: str) -> bool:
        if not name:
            return False
        if _is_address(name) or _is_this_machine(name) or name == self.listens.lower():
            return True
        if any(_covers(pattern, name) for pattern in self.hosts or ()):
            return True
        if _is_this_machine(self.listens):
            return False
        return "." not in name or name.endswith(_LOCAL_NETWORKS) or name == socket.gethostname().lower()

    def _check_site(self, headers: Headers, navigates: bool) -> None:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if navigates or (origin is not None and self.lets_in(origin)):
            return
        if site is not None:
            own = site in ("same-origin", "none")
        else:
            own = origin is None or _is_of(origin, headers.get("host", ""))
        if not own:
            whose = "pages of other sites" if origin is None else f"pages of {origin[:_MOST_SHOWN]!r}"
            raise ApiError(
                "forbidden_origin",
                f"{whose} may not use this server; start it with --api-key, or name the site in --allowed-origins",
            )


def is_preflight(scope: Scope, headers: Headers) -> bool:
    """Whether a browser asks what a page may do, before it does what the page wants. It sends no key."""
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


async def answer_preflight(sites: Sites, headers: Headers, send: Send) -> None:
    """Answer, beside what `shared_with_pages` adds; raises `ApiError` (403) where the site may not."""
    if not sites.lets_in(headers["origin"]):
        message = "pages of other sites may not use this server; start it with --api-key, or --allowed-origins"
        raise ApiError("forbidden_origin", message)
    await send({"type": "http.response.start", "status": 204, "headers": list(_ALLOWED)})
    await send({"type": "http.response.body", "body": b""})


def shared_with_pages(sites: Sites, headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers by which a page may read the answer to a request with `headers`."""
    origin = headers.get("origin")
    if origin is None or not sites.lets_in(origin):
        return []
    if sites.lets_all_in:
        return [_ANY_SITE, _READABLE]
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin"), _READABLE]


def _bare(name: str) -> str:
    """A host's name, as `Sites` compares it: an address of IPv6 without brackets, and no dot at the end."""
    return name.strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    """Whether it is an IP address, which no stranger can point elsewhere; no top-level domain is a number."""
    if name.rpartition(".")[2].isdecimal():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_this_machine(name: str) -> bool:
    """Whether only this machine can be meant: loopback, or `localhost` and below, which browsers resolve to it."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _covers(pattern: str, name: str) -> bool:
    if pattern.startswith("*."):
        return name.endswith(pattern[1:])
    return pattern in (ANY, name)


def _is_of(origin: str, host: str) -> bool:
    """Whether an origin is that of the server, as the client names it. TLS may have ended before, so any scheme."""
    found = ORIGIN.fullmatch(origin.lower())
    if found is None:
        return False
    port = DEFAULT_PORTS.get(found["scheme"], "")
    return found["host"].removesuffix(port) == host.lower().removesuffix(port)


def _navigates(scope: Scope, headers: Headers) -> bool:
    """Whether a browser goes to an address to show it, as by a link, whose page sees nothing of the answer."""
    return scope["method"] in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
