"""Replicas on the fake model and a dispatcher over them, in one process: what kill and fault tests are made of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, Any

from cluster.replica.core import ReplicaCore
from cluster.replica.grammar_start import Grammars
from cluster.replica.sessions import ReplicaFacts, ReplicaTimes
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.wire.link import LOST, RouterLink
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineDeadError
from engine.report import EngineStats, SamplingInputs, StepInputs, StepOutputs, StepReport
from engine.request import Request
from tests.engine.engine_driver import EOS, VOCAB, expected, request
from tests.fake_executor import FakeExecutor
from tests.simulator.links import FaultPlan, FaultyLink, connect_local

if TYPE_CHECKING:
    from cluster.telemetry.tracing.engine_spans import EngineSpans

BLOCK = 4
FREE_RUN = 10**9


class GatedExecutor(FakeExecutor):
    """The fake model, a step at a time where the test wants it so, and mortal where a token says so.

    poison: a token id; a step whose input holds it fails as if a rank had died.
    """

    def __init__(self, num_blocks: int, steps: int = FREE_RUN, poison: int | None = None, pace: float = 0.0) -> None:
        super().__init__(num_blocks, BLOCK, VOCAB, (lambda _: pace) if pace else None)
        self._poison = poison
        self._steps = steps
        self._changed = threading.Condition()
        self._closed = False
        self.executed = 0

    def allow(self, steps: int = 1) -> None:
        with self._changed:
            self._steps += steps
            self._changed.notify_all()

    def execute(self, inputs: StepInputs, sampling: SamplingInputs) -> StepOutputs:
        with self._changed:
            self._changed.wait_for(lambda: self._steps > 0 or self._closed)
            self._steps -= 1
            if self._closed:
                raise EngineDeadError("closed by the test")
        self.executed += 1
        if self._poison is not None and self._poison in inputs.input_ids:
            raise EngineDeadError("poisoned")
        return super().execute(inputs, sampling)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class CheckedCore(EngineCore):
    """An engine that checks itself after every step."""

    def step(self) -> StepReport:
        report = super().step()
        self.check_integrity()
        return report


class LabReplica:
    """One life of one replica."""

    def __init__(
        self,
        name: str,
        executor: GatedExecutor,
        num_blocks: int,
        times: ReplicaTimes,
        fingerprint: str = "",
        spans: EngineSpans | None = None,
        grammars: Grammars | None = None,
        **settings: Any,
    ) -> None:
        defaults = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 64, "block_size": BLOCK}
        config = EngineConfig("fake", **{**defaults, **settings})
        self.name = name
        self.executor = executor
        self.engine = CheckedCore(config, executor, (EOS,), VOCAB, num_blocks)
        facts = ReplicaFacts(name, "fake", config.context_len, VOCAB, BLOCK, num_blocks - 1, (EOS,), fingerprint)
        self.core = ReplicaCore(self.engine, facts, times, grammars=grammars, spans=spans)
        self.links: list[FaultyLink] = []

    async def link(
        self,
        router: str = "router",
        plan: FaultPlan | None = None,
        rng: Random | None = None,
        on_close: Callable[[str], None] = lambda _: None,
    ) -> FaultyLink:
        link = FaultyLink(await connect_local(self.core.serve, router), plan, rng, on_close)
        self.links.append(link)
        return link

    async def until_stats(self, wanted: Callable[[EngineStats], bool]) -> None:
        """Wait until the engine's figures are as `wanted`."""
        await until(lambda: wanted(self.core.stats))

    @property
    def held_blocks(self) -> int:
        stats = self.core.stats
        return stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached


class Lab:
    """Everything of one test; leaving it checks that nothing is left over."""

    def __init__(self, config: DispatcherConfig | None = None, seed: int = 0, **settings: Any) -> None:
        self.rng = Random(seed)
        self.lost: list[tuple[str, str]] = []
        self.on_lost: Callable[[str, str], object] = lambda name, code: self.lost.append((name, code))
        self.dispatcher = Dispatcher(config, self.rng)
        self.alive: dict[str, LabReplica] = {}
        self.graveyard: list[LabReplica] = []
        self._settings = settings

    async def __aenter__(self) -> Lab:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.dispatcher.close()
        for replica in [*self.alive.values(), *self.graveyard]:
            replica.executor.close()
            await replica.core.close()
            for link in replica.links:
                await link.wait_closed()

    async def start(
        self,
        name: str,
        steps: int = FREE_RUN,
        poison: int | None = None,
        pace: float = 0.0,
        plan: FaultPlan | None = None,
        times: ReplicaTimes | None = None,
        num_blocks: int = 512,
        fingerprint: str = "",
        spans: EngineSpans | None = None,
        grammars: Grammars | None = None,
    ) -> LabReplica:
        """Start a replica and give the dispatcher a link to it."""
        executor = GatedExecutor(num_blocks, steps, poison, pace)
        executor.fingerprint = fingerprint
        times = times or ReplicaTimes(heartbeat=0.05)
        replica = LabReplica(name, executor, num_blocks, times, fingerprint, spans, grammars, **self._settings)
        self.alive[name] = replica
        await self.link(replica, plan)
        return replica

    async def link(self, replica: LabReplica, plan: FaultPlan | None = None) -> FaultyLink:
        """Give the dispatcher a link to a replica; `on_lost` is called when the dispatcher gives it up."""
        link = await replica.link(plan=plan, rng=self.rng, on_close=lambda code: self.on_lost(replica.name, code))
        self.dispatcher.add_link(link)
        return link

    def kill(self, name: str) -> LabReplica:
        """End a replica as kill -9 does: its links break, and nothing more is said."""
        replica = self.alive.pop(name)
        self.graveyard.append(replica)
        for link in replica.links:
            if not link.closed:
                link.cut(LOST, "killed")
        replica.executor.close()
        return replica

    async def collect(self, request: Request) -> dict[int, list[int]]:
        """Run a request to its end and return its tokens by choice, with every rule about chunks checked."""
        tokens: dict[int, list[int]] = {choice: [] for choice in range(request.params.n)}
        finished: dict[int, str] = {}
        async for chunk in self.dispatcher.generate(request):
            assert chunk.choice not in finished, "a chunk after the end"
            assert chunk.token_ids or chunk.finish_reason, "an empty chunk"
            if request.params.logprobs is not None:
                assert [entry.token_id for entry in chunk.logprobs] == list(chunk.token_ids)
            tokens[chunk.choice].extend(chunk.token_ids)
            if chunk.finish_reason:
                finished[chunk.choice] = chunk.finish_reason
        assert set(finished) == set(tokens), "a choice without an end"
        return tokens


def oracle(request: Request) -> dict[int, list[int]]:
    """Return what an undisturbed run brings."""
    return {choice: expected(request, choice) for choice in range(request.params.n)}


async def until(condition: Callable[[], bool], deadline: float = 10.0) -> None:
    """Wait until `condition` holds, giving way to whatever has to happen for that."""
    async with asyncio.timeout(deadline):
        while not condition():
            await asyncio.sleep(0.001)


async def serve_nobody(link: RouterLink) -> None:
    """A replica that hangs up at once."""
    link.close()


Serve = Callable[[RouterLink], Awaitable[None]]


def long_request(name: str, seed: int = 0, **params) -> Request:
    """A request of 40 drawn tokens."""
    return request(name, 5, seed=seed, **{"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, **params})
