"""A replica in this process, whoever started it: its group, its engine, and the links that routers open."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn

from cluster.config import ClusterConfig
from cluster.replica.core import ReplicaCore
from cluster.replica.facts import ReplicaFacts
from cluster.replica.flight_dump import dump_flight
from cluster.replica.group_start import StartedGroup, listening_host
from cluster.replica.process_metrics import replica_metrics
from cluster.telemetry.families import Source
from cluster.telemetry.publishing import Publishing, on_loop
from cluster.telemetry.ray_publisher import RayPublisher, publish_period
from cluster.telemetry.tracing.start import replica_spans
from cluster.wire.announcement import Announcement
from cluster.wire.link import LinkAddress
from cluster.wire.tcp import LinkServer
from engine.core import EngineCore
from engine.device.heap import settle_heap
from engine.errors import EngineDeadError
from engine.grammar.process import GrammarService
from engine.loader.fingerprint import model_fingerprint, replica_fingerprint, vocabulary_fingerprint
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# A step may take `step_timeout`; the collective that missed it reports so itself, unless this process is stuck too.
HEALTH_FACTOR = 1.5
LAST_WORDS = 0.2  # seconds for links to carry the reason out before the process ends
LINK_PATIENCE = 5.0  # seconds that a router may hold a lease without a link


class ReplicaHost:
    """Made on the process's event loop once the group has started; everything in it ends with any rank of it.

    on_death: told the reason in a thread of its own, in the last moments of the process.
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
        self._vocabulary = vocabulary_fingerprint(config.model, config.tokenizer)
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
        if group.gang is not None:
            threading.Thread(target=self._watch_gang, name="gang-watch", daemon=True).start()
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
        address = await asyncio.shield(self._listen(listening_host(self._config, [node])))
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

    def _watch_gang(self) -> None:
        gang = self._group.gang
        try:
            if gang is not None:
                gang.wait_for_death()
        except EngineDeadError as error:
            self._loop.call_soon_threadsafe(self.core.on_dead, str(error))

    def _on_dead(self, reason: str) -> None:
        """The engine or a rank is gone: gangs die together. Who started this starts another, routers go elsewhere."""
        logger.error("replica %s ends: %s", self._id, reason)
        self._publishing.stop()
        if self._group.gang is not None:
            self._group.gang.kill()
        # Beside the loop: nothing may hold up the end of this process.
        threading.Thread(target=self._last_words, args=(reason,), name="last-words", daemon=True).start()
        self._loop.call_later(LAST_WORDS, _end_process)

    def _last_words(self, reason: str) -> None:
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
        lambda: Tokenizer(config.tokenizer or config.model).vocabulary(info.vocab_size), info.eos_token_ids
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
        fingerprint=replica_fingerprint(
            model_fingerprint(config.model, info.config.dtype, info.config.quantization), info.arithmetic
        ),
        token_budget=info.config.max_num_batched_tokens,
    )
