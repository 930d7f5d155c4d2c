"""Replicas on the fake model behind real sockets that a test can spoil, and a dispatcher over them; no Ray.

What a partition or a delay does is a matter of links and times: here it takes a tenth of a second per second. The
invariants are on all the time: every engine checks blocks, tables and queues after each step, and the dispatcher's
requests are added up every few milliseconds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from cluster.replica.sessions import ReplicaTimes
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.wire import tcp
from cluster.wire.link import CLOSED, ReplicaLink
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.chaos.tcp_proxy import TcpProxy
from tests.cluster.cluster_lab import FREE_RUN, GatedExecutor, Lab, LabReplica, until

# Of the product's seconds: stall_timeout 3, ping 1, heartbeat 0.5, router_timeout 10, no_replica_timeout 30.
SCALE = 0.1
TIMES = ReplicaTimes(heartbeat=0.05, router_timeout=1.0)
CONFIG = DispatcherConfig(stall_timeout=0.3, ping_interval=0.1, no_replica_timeout=3.0)
PERIOD = 0.005  # seconds between two looks at what must add up


def long_request(name: str, seed: int = 0, tokens: int = 100, prompt: int = 12, **params: object) -> Request:
    """Return a request of `tokens` tokens; seed 0 is greedy."""
    ids = tuple(1 + (seed * 7 + place * 5) % 59 for place in range(prompt))
    temperature = 1.0 if seed else 0.0
    sampling = SamplingParams(**{"temperature": temperature, "max_tokens": tokens, "ignore_eos": True, **params})
    return Request(name, ids, sampling, seed=seed)


class NetLab(Lab):
    """A lab whose links run over TCP, each through a proxy of its own; a link that ends is made again."""

    def __init__(self, config: DispatcherConfig = CONFIG, seed: int = 0, **settings: object) -> None:
        super().__init__(config, seed, **settings)
        self.proxies: dict[str, TcpProxy] = {}
        self.violations: list[str] = []
        self._servers: list[tcp.LinkServer] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> NetLab:
        self._tasks.append(asyncio.create_task(self._watch(self.dispatcher)))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for proxy in self.proxies.values():
            proxy.heal()
        await super().__aexit__(*exc)
        for server in self._servers:
            await server.close()
        for proxy in self.proxies.values():
            await proxy.__aexit__(*exc)
        if exc[0] is None:
            assert not self.violations, self.violations[:3]

    async def start_remote(
        self, name: str, delay: float = 0.0, steps: int = FREE_RUN, pace: float = 0.0, num_blocks: int = 512
    ) -> LabReplica:
        """Start a replica behind a proxy and keep a link to it for as long as the lab lasts."""
        replica = LabReplica(name, GatedExecutor(num_blocks, steps, pace=pace), num_blocks, TIMES, **self._settings)
        self.alive[name] = replica
        server = tcp.LinkServer(replica.core.serve)
        address = await server.start()
        self._servers.append(server)
        proxy = await TcpProxy(address.port, delay).__aenter__()
        self.proxies[name] = proxy
        linked = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._keep_linked(name, replace(address, port=proxy.port), linked)))
        await linked.wait()
        return replica

    async def quiet(self, *replicas: LabReplica) -> None:
        """Wait until nothing runs and no block is held on `replicas`."""
        for replica in replicas:
            await replica.until_stats(lambda stats: stats.num_running + stats.num_waiting == 0)
            await until(lambda replica=replica: replica.held_blocks == 0)

    async def _keep_linked(self, name: str, address: tcp.LinkAddress, linked: asyncio.Event) -> None:
        while True:
            with suppress(tcp.LinkRefusedError, TimeoutError):
                async with asyncio.timeout(1.0):
                    link = await tcp.connect(address, "router")
                self._report_given_up(name, link)
                self.dispatcher.add_link(link)
                linked.set()
                await link.wait_closed()
            await asyncio.sleep(0.025)

    def _report_given_up(self, name: str, link: ReplicaLink) -> None:
        """Have `on_lost` called when the dispatcher gives the link up, the first time."""
        close, codes = link.close, []

        def closing(code: str = CLOSED, message: str = "") -> None:
            if not codes:
                codes.append(code)
                self.on_lost(name, code)
            close(code, message)

        vars(link)["close"] = closing

    async def _watch(self, dispatcher: Dispatcher) -> None:
        counters = dispatcher.counters
        while True:
            ended = counters.outcomes.total()
            if counters.accepted != ended + dispatcher.num_live:
                self.violations.append(f"{counters.accepted} accepted, {ended} ended, {dispatcher.num_live} live")
            if counters.misplaced_rows:
                self.violations.append("a token came at the wrong place")
            await asyncio.sleep(PERIOD)
