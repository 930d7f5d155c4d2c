"""A router's log of what happened to it, on request, for `squadron replay`.

Arrivals and ends of requests, the frames of all links, and which replicas were there: with times, without a word or
token of a prompt or an answer. One JSON object a line; the first one of a file says when its clock was started.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from msgspec import json

from cluster.errors import ApiError
from cluster.private_files import FILE, make_folder
from cluster.router.directory import Connect
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from cluster.wire.codec import Down, Up
from cluster.wire.link import CLOSED, LinkAddress, LinkClosedError, ReplicaLink
from cluster.wire.replica_messages import Begun, Report
from cluster.wire.router_messages import Abort, FinishChoice, Submit
from engine.errors import ConfigError
from engine.request import Request

MOST_BYTES = 64 << 20  # of one router's file and of the one before it, which has the same name and `.1`
MOST_FILES = 64  # in the folder; the oldest are deleted for a new one
PREFIX, SUFFIX = "incident-", ".jsonl"
logger = logging.getLogger(__name__)


class IncidentLog:
    """Writes one router's file. What cannot be written is logged once, and nothing is written from then on.

    folder: made if it is not there. name: of the router and its model. clock: seconds, those of the event loop.
    Raises `ConfigError` where the folder or the file cannot be made.
    """

    def __init__(self, folder: str, name: str, clock: Callable[[], float], most_bytes: int = MOST_BYTES) -> None:
        self._path = Path(folder) / f"{PREFIX}{re.sub(r'[^A-Za-z0-9.-]', '-', name)}{SUFFIX}"
        self._name = name
        self._clock = clock
        self._most = most_bytes // 2
        self._size = 0
        self._file: int | None = None
        self._number = 0
        try:
            make_folder(self._path.parent)
            _make_room(self._path.parent)
            self._open()
        except OSError as error:
            message = f"record_incidents: {folder} cannot be written to ({error.strerror}); name a folder of your own"
            raise ConfigError(message, "record_incidents") from error

    def note(self, what: str, **told: Any) -> None:
        """Write that something happened now."""
        if self._file is None:
            return
        line = json.encode({"t": round(self._clock(), 6), "what": what, **told}) + b"\n"
        try:
            if self._size + len(line) > self._most:
                self.close()
                os.replace(self._path, f"{self._path}.1")
                self._open()
            self._size += os.write(self._file, line)
        except OSError as error:
            logger.warning("%s cannot be written to, and records nothing more: %s", self._path, error)
            self.close()

    def next_number(self) -> int:
        """Return the number of a new request, by which the log names it."""
        self._number += 1
        return self._number

    def close(self) -> None:
        """Write nothing more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def connecting(self, connect: Connect) -> Callable[[LinkAddress, str], Awaitable[ReplicaLink]]:
        """Return `connect` whose links are recorded."""

        async def recorded(address: LinkAddress, router_id: str) -> ReplicaLink:
            return RecordedLink(await connect(address, router_id), self)

        return recorded

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE)
        self._size = 0
        start = {"t": round(self._clock(), 6), "what": "start", "router": self._name, "wall": time.time()}
        self._size += os.write(self._file, json.encode(start) + b"\n")


def _make_room(folder: Path) -> None:
    """Delete the oldest files where there are too many."""
    found: list[tuple[float, Path]] = []
    for path in folder.glob(f"{PREFIX}*{SUFFIX}*"):
        with suppress(FileNotFoundError):  # another router has moved or deleted it
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[: max(0, len(found) - MOST_FILES + 1)]:
        path.unlink(missing_ok=True)


class RecordedLink(ReplicaLink):
    """A link whose frames, beginning and end are recorded."""

    def __init__(self, inner: ReplicaLink, log: IncidentLog) -> None:
        self.welcome = welcome = inner.welcome
        self._inner = inner
        self._log = log
        self._replica = welcome.replica_id
        self._over = False
        log.note(
            "linked",
            replica=self._replica,
            life=welcome.incarnation,
            fingerprint=welcome.fingerprint,
            draining=welcome.draining,
        )

    def send(self, message: Up) -> None:
        """Send a message."""
        told: dict[str, Any] = {}
        if isinstance(message, Submit):
            told = {"stream": message.stream, "prompt": len(message.prompt), "retried": message.retried}
        elif isinstance(message, Abort | FinishChoice):
            told = {"stream": message.stream}
        self._log.note("up", replica=self._replica, frame=type(message).__name__, **told)
        self._inner.send(message)

    async def receive(self) -> Down:
        """Return the next message."""
        try:
            message = await self._inner.receive()
        except LinkClosedError as error:
            self._ended(error.code)
            raise
        told: dict[str, Any] = {}
        if isinstance(message, Report):
            told = {"number": message.sequence, "tokens": len(message.tokens), "ends": len(message.finishes)}
        elif isinstance(message, Begun):
            told = {"streams": message.streams}
        self._log.note("down", replica=self._replica, frame=type(message).__name__, **told)
        return message

    def close(self, code: str = CLOSED, message: str = "") -> None:
        """End the link."""
        self._ended(code)
        self._inner.close(code, message)

    @property
    def closed(self) -> bool:
        """Whether the link is over for this end."""
        return self._inner.closed

    async def wait_closed(self) -> None:
        """Return when the link is over."""
        await self._inner.wait_closed()

    def _ended(self, code: str) -> None:
        if not self._over:
            self._over = True
            self._log.note("unlinked", replica=self._replica, code=code)


class RecordedSource:
    """A token source whose requests are recorded: how long, how drawn, of which tenant (a digest), how it ended."""

    def __init__(self, source: TokenSource, log: IncidentLog) -> None:
        self._source = source
        self._log = log
        self._open: dict[str, set[int]] = {}  # choices by request that have not ended

    async def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncGenerator[TokenChunk, None]:
        """Run a request; see `TokenSource.generate`."""
        number, params = self._log.next_number(), request.params
        tenant = blake2b(request.tenant.encode(), digest_size=8, person=b"sqd-incident").hexdigest()
        self._log.note(
            "arrive",
            request=number,
            prompt=len(request.prompt_token_ids),
            max_tokens=params.max_tokens,
            n=params.n,
            seed=request.seed,
            tenant=tenant,
            continues=context.continues,
        )
        choices = self._open[request.request_id] = set(range(params.n) if request.resume is None else request.resume)
        outcome, tokens = "aborted", 0
        try:
            # What `TokenSource.generate` returns can be closed.
            chunks = cast("AsyncGenerator[TokenChunk, None]", self._source.generate(request, context))
            async with aclosing(chunks):
                async for chunk in chunks:
                    tokens += len(chunk.token_ids)
                    if chunk.finish_reason is not None:
                        choices.discard(chunk.choice)
                    yield chunk
        except ApiError as error:
            outcome = error.code
            raise
        finally:
            # Who has the last chunk of each choice closes the iterator.
            outcome = outcome if choices or outcome != "aborted" else "completed"
            self._log.note("end", request=number, outcome=outcome, tokens=tokens)
            self._open.pop(request.request_id, None)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice."""
        self._open.get(request_id, set()).discard(choice)
        self._source.finish_choice(request_id, choice)
