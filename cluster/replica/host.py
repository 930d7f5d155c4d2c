"""A replica in this process, however it was started: its group, its engine, and the links that routers open."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import NoReturn

import msgspec
from prometheus_client.core import Metric

from cluster.accounts.flight_recorder import FlightRecorder
from cluster.config import ClusterConfig
from cluster.lifecycle.leases import listening_host
from cluster.private_files import opener
from cluster.replica.core import ReplicaCore
from cluster.replica.sessions import ReplicaFacts
from cluster.replica.worker_group import StartedGroup, memory_metric
from cluster.telemetry.families import Source
from cluster.telemetry.metrics import account_metrics, cache_metric, engine_metrics, sleep_metric
from cluster.telemetry.publishing import Publishing, RayPublisher, on_loop, publish_period
from cluster.telemetry.samples import family_of
from cluster.telemetry.tracing.start import replica_spans
from cluster.wire.link import Announcement, LinkAddress
from cluster.wire.tcp import LinkServer
from cluster.wire.translation import waited
from engine.core import EngineCore
from engine.device.machine import settle_heap
from engine.errors import EngineDeadError
from engine.grammar.compile_service import GrammarService
from engine.loader.fingerprint import vocabulary_fingerprint
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# A step may take `step_timeout`; the collective that missed it reports so itself, unless this process is stuck too.
HEALTH_FACTOR = 1.5
EXIT_DELAY = 0.2  # seconds for links to carry the reason out before the process ends
LINK_PATIENCE = 5.0  # seconds that a router may hold a lease without a link
MOST_DUMPS = 20  # in a folder; the oldest goes
PREFIX = "squadron-flight-"


class ReplicaHost:
    """Made on the process's event loop once the group has started; everything in it ends with any rank of it.

    on_death: called with the reason in a thread of its own, in the last moments of the process.
    log_folder: where what requests waited for is written then; None = nowhere.
    """

    def __init__(
        self,
        replica_id: str,
        config: ClusterConfig,
        group: StartedGroup,
        on_death: Callable[[str], None],
        log_folder: Path | None = None,
    ) -> None:
        self._id = replica_id
        self._log_folder = log_folder
        self._config = config
        self._group = group
        self._on_death = on_death
        self._vocabulary = vocabulary_fingerprint(config.source, config.tokenizer)
        self._loop = asyncio.get_running_loop()
        self._deadline = HEALTH_FACTOR * config.step_timeout
        facts = _facts(replica_id, config, group)
        self._spans = replica_spans(config, replica_id)
        self.core = ReplicaCore(
            _engine(group), facts, on_dead=self._on_dead, grammars=_grammars(group), spans=self._spans
        )
        own = {"replica": replica_id, "rank": "0"}
        publisher = RayPublisher((Source.TOLD, Source.REPLICA, Source.RANK), own, config.metrics_compat is not None)
        self._publishing = Publishing(on_loop(lambda: replica_metrics(self.core)), publisher, publish_period())
        self._publishing.start()
        self._addresses: dict[str, asyncio.Task[LinkAddress]] = {}  # host -> where links are taken there
        if group.workers is not None:
            threading.Thread(target=self._watch_workers, name="worker-watch", daemon=True).start()
        settle_heap()

    async def lease(self, router_id: str, node: str) -> AsyncIterator[Announcement]:
        """Announce this replica to a router; stays open until it lets go or one of the two is gone.

        A router that is killed lets go of nothing: what shows its end is that its link is gone.
        """
        announcement = await self.announce(node)
        logger.info("replica %s: leased by router %s", self._id, router_id)
        yield announcement
        await self.core.until_left(router_id, LINK_PATIENCE)

    async def announce(self, node: str) -> Announcement:
        """Return how this replica is reached from `node`."""
        info = self._group.info
        address = await asyncio.shield(self._listen(listening_host(self._config.link_host, [node])))
        return Announcement(
            self._id, address, info.phases, info.kv_tokens, self._group.pids, self._vocabulary, info.words
        )

    def close_traces(self) -> None:
        """Export the spans that wait, in a few seconds at most. Can be called twice; from any thread."""
        if self._spans is not None:
            self._spans.close()

    def check_health(self) -> None:
        """End the replica when it does not move: health is progress, not that a process exists."""
        if not self.core.is_healthy(self._deadline):
            reason = f"no step and no idle tick within {self._deadline:g} s"
            self.core.on_dead(reason)
            raise EngineDeadError(reason)

    def _listen(self, host: str) -> asyncio.Task[LinkAddress]:
        if host not in self._addresses:
            self._addresses[host] = self._loop.create_task(LinkServer(self.core.serve).start(host))
        return self._addresses[host]

    def _watch_workers(self) -> None:
        workers = self._group.workers
        try:
            if workers is not None:
                workers.wait_for_death()
        except EngineDeadError as error:
            self._loop.call_soon_threadsafe(self.core.on_dead, str(error))

    def _on_dead(self, reason: str) -> None:
        """The engine or a rank is gone: all end together. Who started this starts another, routers go elsewhere."""
        logger.error("replica %s ends: %s", self._id, reason)
        self._publishing.stop()
        if self._group.workers is not None:
            self._group.workers.kill()
        # Beside the loop: nothing may hold up the end of this process.
        threading.Thread(target=self._record_exit, args=(reason,), name="exit-record", daemon=True).start()
        self._loop.call_later(EXIT_DELAY, _end_process)

    def _record_exit(self, reason: str) -> None:
        if self._log_folder is not None:
            dump_flight(self.core.flight, self._log_folder, self._id, reason)
        self._on_death(reason)
        self.close_traces()


def _end_process() -> NoReturn:
    # Nothing in this process can be trusted to unwind: a thread may hang in a collective for good.
    logging.shutdown()
    os._exit(1)


def _engine(group: StartedGroup) -> EngineCore:
    info = group.info
    return EngineCore(info.config, group.executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)


def _grammars(group: StartedGroup) -> GrammarService:
    info, config = group.info, group.info.config
    return GrammarService(
        lambda: Tokenizer(config.tokenizer or config.source).vocabulary(info.vocab_size), info.eos_token_ids
    )


def _facts(replica_id: str, config: ClusterConfig, group: StartedGroup) -> ReplicaFacts:
    info = group.info
    return ReplicaFacts(
        replica_id=replica_id,
        model=config.model_id,
        max_model_len=info.config.context_len,
        vocab_size=info.vocab_size,
        block_size=info.config.block_size,
        num_kv_blocks=info.num_kv_blocks - 1,
        eos_token_ids=info.eos_token_ids,
        fingerprint=group.executor.fingerprint,
        token_budget=info.config.token_budget,
    )


def log_folder(logger_name: str = "ray.serve") -> Path | None:
    """Return where a logger writes its file, as Ray Serve set it up in this process; None where it writes none."""
    for handler in logging.getLogger(logger_name).handlers:
        inner = handler.target if isinstance(handler, logging.handlers.MemoryHandler) else handler
        if isinstance(inner, logging.FileHandler):
            return Path(inner.baseFilename).parent
    return None


def dump_flight(
    flight: FlightRecorder, folder: Path, replica_id: str, reason: str, clock: Callable[[], float] = time.time
) -> Path | None:
    """Write what is recorded to a new file of `folder` and return its path; None, and a line in the log, on failure.

    The file is its owner's alone: it names tenants, and when they asked for what. clock: seconds since 1970. Events
    bear their age in seconds when the file was written.
    """
    now, at = flight.clock(), clock()
    known = flight.everything()
    requests = {key: [waited(event, now) for event in events] for key, events in known.items()}
    body = {"replica": replica_id, "at": at, "reason": reason, "requests": requests}
    path = folder / f"{PREFIX}{replica_id}-{at:.3f}.json"
    try:
        with open(path, "xb", opener=opener) as file:
            file.write(msgspec.json.encode(body))
        for old in sorted(folder.glob(f"{PREFIX}*.json"), key=lambda one: one.stat().st_mtime)[:-MOST_DUMPS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.error("the flight record cannot be kept in %s: %s", folder, error)
        return None
    logger.info("what requests waited for is in %s", path)
    return path


def replica_metrics(core: ReplicaCore) -> Iterable[Metric]:
    """Yield the figures of a replica and of its rank 0. Called on the event loop that it lives on."""
    model, replica = core.facts.model, core.facts.replica_id
    yield from engine_metrics(model, {replica: core.stats})
    yield from account_metrics(model, {replica: core.costs})
    yield cache_metric(model, {replica: (core.facts.block_size, core.facts.num_kv_blocks)})
    yield sleep_metric(model, {replica: core.sleep_level})
    yield family_of("replica_queue_age_seconds", {(model,): core.queue_age})
    yield from core.metrics.collect(core.num_unwanted)
    yield memory_metric(model)
