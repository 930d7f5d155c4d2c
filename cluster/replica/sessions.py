"""The links of a replica's routers: welcome, reports of each step, heartbeats, and the end of silent ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice

from cluster.admission.capacity import QueueState, together
from cluster.replica.runs import Changes, RouterSession, Run
from cluster.telemetry.logs import BestEffort
from cluster.wire.link import DAMAGED, SILENT, SUPERSEDED, RouterLink
from cluster.wire.parts import Load, ReplicaCosts, SleepState
from cluster.wire.replica_messages import Draining, Welcome
from cluster.wire.translation import block_key
from engine.errors import redacted
from engine.report import BlockEvents, StepReport

logger = logging.getLogger(__name__)

SNAPSHOT_BLOCKS = 8192  # keys in one message


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica is and runs, as in `Welcome`. `num_kv_blocks` excludes the null block.

    token_budget: tokens that a step of its engine may compute.
    """

    replica_id: str
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    token_budget: int = 8192

    def welcome(self, incarnation: int, draining: bool) -> Welcome:
        """Return the first message to a router."""
        return Welcome(
            self.replica_id,
            incarnation,
            self.model,
            self.max_model_len,
            self.vocab_size,
            self.block_size,
            self.num_kv_blocks,
            self.eos_token_ids,
            draining,
            self.fingerprint,
        )


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """Times in seconds.

    heartbeat: how often a router gets a heartbeat, with what runs here for it. router_timeout: silence of a
    router after which it is taken for dead and its requests are ended. costs: between two looks of a router at the
    accounts.
    """

    heartbeat: float = 0.5
    router_timeout: float = 10.0
    costs: float = 1.0


class CachedBlocks:
    """What a replica's prefix cache holds, by block key, for routers that come later."""

    def __init__(self) -> None:
        self._keys: dict[int, None] = {}  # in order of storing

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, events: BlockEvents) -> Changes | None:
        """Take in one step's events and return them as they travel, or None if there are none."""
        if not (events.stored or events.removed or events.cleared):
            return None
        stored, removed = list(map(block_key, events.stored)), list(map(block_key, events.removed))
        if events.cleared:
            self._keys.clear()
        for key in removed:
            self._keys.pop(key, None)
        self._keys.update(dict.fromkeys(stored))
        return stored, removed, events.cleared

    def snapshot(self) -> Iterator[Changes]:
        """Return all that is cached, as changes that begin with forgetting; at least one."""
        keys = iter(list(self._keys))
        yield list(islice(keys, SNAPSHOT_BLOCKS)), [], True
        while chunk := list(islice(keys, SNAPSHOT_BLOCKS)):
            yield chunk, [], False


class RouterSessions:
    """The links of all routers to one replica, by router id. Used on one event loop.

    costs: the accounts, sent to each router every `ReplicaTimes.costs`. load: the engine's load now. runs: of all
    routers. abort: called with each run of a router whose link ends.
    """

    def __init__(
        self,
        facts: ReplicaFacts,
        incarnation: int,
        times: ReplicaTimes,
        load: Callable[[], Load],
        costs: Callable[[], ReplicaCosts],
        runs: Sized,
        abort: Callable[[Run], None],
    ) -> None:
        self._facts = facts
        self._incarnation = incarnation
        self._times = times
        self._load = load
        self._costs = costs
        self._runs = runs
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, RouterSession] = {}
        self._cached = CachedBlocks()
        self._num_begun = 0
        self._draining = False
        self._sleep: SleepState | None = None
        self._best_effort = BestEffort()
        self._ticker = self._loop.create_task(self._tick())

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def queue(self) -> QueueState:
        """What waits in the routers."""
        return together(session.queue for session in self._sessions.values())

    @property
    def all(self) -> list[RouterSession]:
        """The routers' sessions, each with a link."""
        return list(self._sessions.values())

    def get(self, router_id: str) -> RouterSession | None:
        """Return a router's session, None while it has no link."""
        return self._sessions.get(router_id)

    def begin(self, link: RouterLink) -> RouterSession:
        """Welcome a router. A former link of the same router ends, with its runs."""
        former = self._sessions.get(link.router_id)
        if former is not None:
            self.end(former, SUPERSEDED, "the router opened a new link")
        self._num_begun += 1
        session = RouterSession(link, self._num_begun, self._incarnation, self._loop.time())
        self._sessions[link.router_id] = session
        session.send(self._facts.welcome(self._incarnation, self._draining))
        if len(self._cached):
            self.report_blocks(session)
        if self._sleep is not None:
            session.beat(self._load(), self._loop.time(), self._others(session), None, self._sleep)
        return session

    def end(self, session: RouterSession, code: str, message: str) -> None:
        """Close a router's link and end its runs."""
        session.link.close(code, message)
        for run in list(session.runs.values()):
            self._abort(run)
        if self._sessions.get(session.link.router_id) is session:
            del self._sessions[session.link.router_id]

    def end_all(self, code: str, message: str) -> None:
        """Close the links of all routers and end their runs."""
        for session in list(self._sessions.values()):
            self.end(session, code, message)

    def begin_anew(self, facts: ReplicaFacts, incarnation: int) -> None:
        """End all links and their runs; routers that come from now on are welcomed by another life's facts."""
        self._facts, self._incarnation, self._cached = facts, incarnation, CachedBlocks()
        self.end_all(SUPERSEDED, "the replica runs another model now")

    def close(self, code: str, message: str) -> None:
        """End all links, and send no more heartbeats."""
        self._ticker.cancel()
        self.end_all(code, message)

    def drain(self, hand_over: bool) -> None:
        """Tell all routers, later ones too, that this replica is going to stop. hand_over: as in `Draining`."""
        self._draining = True
        for session in self._sessions.values():
            session.send(Draining(hand_over))

    def tell_sleep(self, state: SleepState) -> None:
        """Tell all routers, later ones too, how the replica sleeps."""
        self._sleep = state
        for session in list(self._sessions.values()):
            session.beat(self._load(), self._loop.time(), self._others(session), None, state)

    def report(self, report: StepReport, load: Load) -> None:
        """Send each router its rows of one step, and what the prefix cache gained and lost."""
        now = self._loop.time()
        blocks = self._best_effort.do(self._cached.note, report.events)
        for session in list(self._sessions.values()):
            if blocks is not None or session.has_rows:
                self._flush(session, report.step, load, now, blocks)

    def report_blocks(self, session: RouterSession) -> None:
        """Send a router all keys of the prefix cache."""
        for changes in self._cached.snapshot():
            session.flush(0, self._load(), self._others(session), changes)

    def _flush(self, session: RouterSession, step: int, load: Load, now: float, blocks: Changes | None) -> None:
        """Send a router its report; where that fails its link ends, since rows are lost."""
        try:
            session.flush(step, load, self._others(session), blocks, self._costs_for(session, now))
        except Exception as error:
            names = self._facts.replica_id, session.link.router_id
            logger.error("replica %s: no report can be sent to router %s", *names, exc_info=redacted(error))
            self.end(session, DAMAGED, "a report could not be sent")

    def _others(self, session: RouterSession) -> int:
        """Requests here that are not the router's own: known to this loop, not to the engine some steps later."""
        return len(self._runs) - len(session.runs)

    def _costs_for(self, session: RouterSession, now: float) -> ReplicaCosts | None:
        """Return the accounts where they are due."""
        if now < session.costs_due:
            return None
        session.costs_due = now + self._times.costs
        return self._costs()

    async def _tick(self) -> None:
        expected = self._loop.time()
        while True:
            now = self._loop.time()
            if now - expected > self._times.heartbeat:
                # This process was stopped or starved: what the routers said meanwhile has not been read yet.
                for session in self._sessions.values():
                    session.last_heard = now
            for session in list(self._sessions.values()):
                self._best_effort.do(self._attend, session, now)
            expected = now + self._times.heartbeat / 2
            await asyncio.sleep(self._times.heartbeat / 2)

    def _attend(self, session: RouterSession, now: float) -> None:
        if now - session.last_heard > self._times.router_timeout:
            self.end(session, SILENT, "the router has been silent for too long")
        elif now - session.last_beat >= self._times.heartbeat:
            costs = self._costs_for(session, now)
            session.beat(self._load(), now, self._others(session), costs, self._sleep)
