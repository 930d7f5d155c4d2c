"""In-process links for simulations and tests: frames without a socket, and links that fail on purpose."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

from msgspec import structs

from cluster.wire.codec import Down, Up
from cluster.wire.link import (
    CLOSED,
    LOST,
    FramePipe,
    FrameReplicaLink,
    FrameRouterLink,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    ReplicaLink,
    RouterLink,
)
from cluster.wire.replica_messages import BlockUpdate, Report
from cluster.wire.router_messages import Hello


class LocalFrames:
    """One end: sends into one pipe, receives from the other. `over`: set once either end has closed.

    served: the task that serves the other end, kept alive as long as this.
    """

    served: asyncio.Task[None]

    def __init__(self, sending: FramePipe, receiving: FramePipe, over: asyncio.Event) -> None:
        self.over = over
        self._sending = sending
        self._receiving = receiving

    @property
    def closed(self) -> bool:
        """Whether either end closed the link."""
        return self.over.is_set()

    def send(self, frame: bytes) -> None:
        """Put a frame where the other end takes it."""
        try:
            self._sending.put(frame)
        except LinkClosedError as error:
            self.close(error.code, error.message)
            raise

    async def receive(self) -> bytes:
        """Take the next frame."""
        return await self._receiving.get()

    def close(self, code: str = CLOSED, message: str = "") -> None:
        """End both directions; the other end may still take what was sent to it."""
        self._sending.close(code, message)
        self._receiving.close(code, message, discard=True)
        self.over.set()


async def connect_local(
    serve: Callable[[RouterLink], Coroutine[Any, Any, None]], router_id: str, limits: LinkLimits | None = None
) -> ReplicaLink:
    """Open a link to whoever `serve`s in this process. Raises `LinkRefusedError`."""
    limits = limits or LinkLimits()
    up = FramePipe(limits.max_up_bytes, limits.max_message_bytes)
    down = FramePipe(limits.max_down_bytes, limits.max_message_bytes)
    over = asyncio.Event()
    frames = LocalFrames(up, down, over)
    frames.served = asyncio.create_task(serve(FrameRouterLink(LocalFrames(down, up, over), Hello(router_id))))
    try:
        return await FrameReplicaLink.welcomed(frames)
    except LinkClosedError as error:
        raise LinkRefusedError(f"the replica refused the link: {error}") from error


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong by chance. Shares are 0 to 1; delays in seconds.

    repeat: messages that arrive twice. drop_up / drop_down: messages that vanish. delay: added to each message.
    drop_blocks / late_blocks: updates of the prefix cache that vanish from the reports which carry them, or come
        with the report after.
    cut_after: messages received after which the link breaks; None = never.
    """

    repeat: float = 0.0
    drop_up: float = 0.0
    drop_down: float = 0.0
    delay: float = 0.0
    drop_blocks: float = 0.0
    late_blocks: float = 0.0
    cut_after: int | None = None


class FaultyLink(ReplicaLink):
    """Wraps a link. `heard` keeps what came down, for `inject` into the link of a later life.

    `hold` stops both directions without closing anything (a partition, a stopped process) until `release`.
    on_close: called with the code when the router gives the link up, the first time.
    """

    def __init__(
        self,
        inner: ReplicaLink,
        plan: FaultPlan | None = None,
        rng: Random | None = None,
        on_close: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._on_close = on_close
        self._given_up = False
        self.welcome = inner.welcome
        self.heard: list[Down] = []
        self._inner = inner
        self._plan = plan or FaultPlan()
        self._rng = rng or Random()
        self._ready: deque[Down] = deque()
        self._news = asyncio.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._held: list[Up] = []
        self._to_drop: list[type[Up | Down]] = []
        self._late: BlockUpdate | None = None
        self._ended: LinkClosedError | None = None
        self._pump = asyncio.create_task(self._receive_all())

    def send(self, message: Up) -> None:
        """Pass the message on, or hold it, or lose it."""
        if self._ended is not None:
            raise LinkClosedError(self._ended.code, self._ended.message)
        if type(message) in self._to_drop:
            self._to_drop.remove(type(message))
        elif not self._flowing.is_set():
            self._held.append(message)
        elif self._rng.random() >= self._plan.drop_up:
            self._pass_on(message)
            if self._rng.random() < self._plan.repeat:
                self._pass_on(message)

    async def receive(self) -> Down:
        """Return what came through."""
        while not self._ready:
            if self._ended is not None:
                raise LinkClosedError(self._ended.code, self._ended.message)
            self._news.clear()
            await self._news.wait()
        return self._ready.popleft()

    def drop_next(self, kind: type[Up | Down]) -> None:
        """Lose the next message of this kind, whichever way it goes."""
        self._to_drop.append(kind)

    def inject(self, message: Down) -> None:
        """Let `message` arrive now, whoever said it and whenever."""
        self._ready.append(message)
        self._news.set()

    def cut(self, code: str = LOST, message: str = "cut on purpose") -> None:
        """Break the link: what is on its way is lost, and the replica hears of it."""
        self._ready.clear()
        self._end(LinkClosedError(code, message))
        self._inner.close(code, message)

    def hold(self) -> None:
        """Let nothing through in either direction."""
        self._flowing.clear()

    def release(self) -> None:
        """Let everything through that was held back."""
        self._flowing.set()
        held, self._held = self._held, []
        if not self._inner.closed:
            for message in held:
                self._inner.send(message)

    def close(self, code: str = CLOSED, message: str = "") -> None:
        """Close the wrapped link, unless it is held: then the replica hears nothing of it."""
        self._end(LinkClosedError(code, message))
        if not self._given_up:
            self._given_up = True
            self._on_close(code)
        if self._flowing.is_set():
            self._inner.close(code, message)

    @property
    def closed(self) -> bool:
        """Whether this end of the link is over."""
        return self._ended is not None

    async def wait_closed(self) -> None:
        """Wait for the end of the wrapped link; a held one is closed now."""
        self._inner.close()
        self._pump.cancel()
        await asyncio.wait([self._pump])
        await self._inner.wait_closed()

    def _end(self, error: LinkClosedError) -> None:
        self._ended = self._ended or error
        self._news.set()

    def _pass_on(self, message: Up) -> None:
        if self._plan.delay:
            asyncio.get_running_loop().call_later(self._plan.delay, self._send_late, message)
        else:
            self._inner.send(message)

    def _send_late(self, message: Up) -> None:
        if not self._inner.closed:
            self._inner.send(message)

    async def _receive_all(self) -> None:
        count = 0
        try:
            while True:
                message = await self._inner.receive()
                self.heard.append(message)
                await self._flowing.wait()
                self._arrive(message)
                count += 1
                if count == self._plan.cut_after:
                    self.cut()
        except LinkClosedError as error:
            await self._flowing.wait()
            self._end(error)

    def _with_blocks(self, report: Report) -> Report:
        """Return the report with another update of the prefix cache, or none."""
        blocks, draw = report.blocks, self._rng.random()
        if draw < self._plan.drop_blocks:
            blocks = None
        elif draw < self._plan.drop_blocks + self._plan.late_blocks or self._late is not None:
            blocks, self._late = self._late, blocks
        return structs.replace(report, blocks=blocks)

    def _arrive(self, message: Down) -> None:
        if type(message) in self._to_drop:
            self._to_drop.remove(type(message))
            return
        if isinstance(message, Report) and (self._plan.drop_blocks or self._plan.late_blocks):
            message = self._with_blocks(message)
        copies = 2 if self._rng.random() < self._plan.repeat else 1
        if self._rng.random() < self._plan.drop_down:
            copies = 0
        deliver: Callable[[Down], None] = self.inject
        for _ in range(copies):
            if self._plan.delay:
                asyncio.get_running_loop().call_later(self._plan.delay, deliver, message)
            else:
                deliver(message)
