"""The replica deployment: one tensor-parallel group, one scheduler, one report stream to each router."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import ray
from ray import serve

from cluster.announcement import Announcement
from cluster.autoscaling.figures import replica_stats
from cluster.config import ClusterConfig, resolve_config
from cluster.group_start import StartedGroup, listening_host, start_group
from cluster.life.start import Start
from cluster.life.start_register import StartRegister, living_actors, version_of
from cluster.link import LinkAddress
from cluster.links.tcp import LinkServer
from cluster.logs import log_to_serve
from cluster.orphans import watch_parent
from cluster.replica_core import ReplicaCore
from cluster.replica_facts import ReplicaFacts
from cluster.start_error import ReplicaStartError
from engine.core import EngineCore
from engine.errors import EngineDeadError, SquadronError
from engine.fingerprint import model_fingerprint, vocabulary_fingerprint
from engine.grammar.process import GrammarService
from engine.tokenizer import Tokenizer
from parallel.errors import ParallelError

logger = logging.getLogger(__name__)

# A step may take `step_timeout`; the collective that missed it reports so itself, unless this process is stuck too.
HEALTH_FACTOR = 1.5
LAST_WORDS = 0.2  # seconds for links to carry the reason out before the process ends
LINK_PATIENCE = 5.0  # seconds that a router may hold a lease without a link


class Replica:
    """Serve builds one per replica, in bundle 0 of its placement group. Everything in it ends with any rank of it.

    title: what errors call its model, "" where there is no other.
    """

    def __init__(self, settings: dict[str, Any], title: str = "") -> None:
        log_to_serve()
        watch_parent()
        self._id = serve.get_replica_context().replica_id.unique_id
        self._start = _start(self._id, settings)
        self._start.hold_back()
        try:
            config = resolve_config(settings)
            self._group = start_group(config, self._start.phase)
            facts = _facts(self._id, config, self._group)
            self._vocabulary = vocabulary_fingerprint(config.model, config.tokenizer)
        except (SquadronError, ParallelError) as error:
            self._start.failed(str(error))
            raise ReplicaStartError.of(error, title) from error
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._deadline = HEALTH_FACTOR * config.step_timeout
        self._core = ReplicaCore(_engine(self._group), facts, on_dead=self._on_dead, grammars=_grammars(self._group))
        self._addresses: dict[str, asyncio.Task[LinkAddress]] = {}  # host -> where links are taken there
        if self._group.gang is not None:
            threading.Thread(target=self._watch_gang, name="gang-watch", daemon=True).start()
        self._start.ready()

    async def lease(self, router_id: str, node: str, watch: None = None) -> AsyncIterator[Announcement]:
        """Tell a router on `node` how to reach this replica; stays open until it lets go or one of the two is gone.

        A router that is killed lets go of nothing: what shows its end is that its link is gone.
        `watch` steers the call on the router's side (`cluster.discovery`) and arrives as None.
        """
        info = self._group.info
        address = await asyncio.shield(self._listen(listening_host(self._config, [node])))
        logger.info("replica %s: leased by router %s", self._id, router_id)
        yield Announcement(self._id, address, info.phases, info.kv_tokens, self._group.pids, self._vocabulary)
        await self._core.until_left(router_id, LINK_PATIENCE)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy goes by (called by Serve)."""
        core = self._core
        return replica_stats(core.stats, self._config.max_num_seqs, core.prefill_wait, core.queue)

    def check_health(self) -> None:
        """End the replica when it does not move: health is progress, not that a process exists (called by Serve)."""
        if not self._core.is_healthy(self._deadline):
            reason = f"no step and no idle tick within {self._deadline:g} s"
            self._core.on_dead(reason)
            raise EngineDeadError(reason)

    def _listen(self, host: str) -> asyncio.Task[LinkAddress]:
        if host not in self._addresses:
            self._addresses[host] = self._loop.create_task(LinkServer(self._core.serve).start(host))
        return self._addresses[host]

    def _watch_gang(self) -> None:
        gang = self._group.gang
        try:
            if gang is not None:
                gang.wait_for_death()
        except EngineDeadError as error:
            self._loop.call_soon_threadsafe(self._core.on_dead, str(error))

    def _on_dead(self, reason: str) -> None:
        """The engine or a rank is gone: gangs die together. Serve starts a new replica, routers go elsewhere."""
        logger.error("replica %s ends: %s", self._id, reason)
        if self._group.gang is not None:
            self._group.gang.kill()
        # Beside the loop: nothing may hold up the end of this process.
        threading.Thread(target=self._start.died, args=(reason,), name="last-words", daemon=True).start()
        self._loop.call_later(LAST_WORDS, _end_process)


def _end_process() -> NoReturn:
    # Nothing in this process can be trusted to unwind: a thread may hang in a collective for good.
    logging.shutdown()
    os._exit(1)


def _start(replica_id: str, settings: dict[str, Any]) -> Start:
    context = serve.get_replica_context()
    register = StartRegister(context.app_name, context.deployment, version_of(settings))
    actor = ray.get_runtime_context().get_actor_name() or replica_id
    return Start(register, replica_id, actor, living_actors)


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
        fingerprint=model_fingerprint(config.model, info.config.dtype),
    )
