"""How far one router goes: live requests over many simulated replicas, which run in a process of their own.

    python -m tests.bench.router_scale [--replicas 128] [--live 10000] [--seconds 20]

Real links over TCP, reports, index, token logs and a consumer for each stream; only the model is a formula. What
counts is the router's own CPU time: at 100 % of one core it is saturated, whatever share of it the other process
leaves. Figures: microseconds of a choice (median, 99th percentile) as requests come in; with prompts of 16k tokens
at 4, 32 and 128 replicas, cached nowhere, at a home, and everywhere; to hash such a prompt; bytes of each live
request, without and with its consumer, its task and the index; bytes of each block in the index; tokens per second of
CPU time; hit rate, and as a share of what a cache that knows the future finds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from random import Random

import psutil

from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.prefix_index import PrefixIndex, PromptKeys
from cluster.router.replica_handle import LiveRequest, ReplicaHandle
from cluster.router.selection import Chooser
from cluster.router.token_log import TokenLog
from cluster.simulator.engine import StepTimes
from cluster.wire import tcp
from cluster.wire.link import LinkAddress
from cluster.wire.replica_messages import Welcome
from engine.kv.block_manager import prompt_hashes
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.bench.shared_prefixes import Workload, oracle_hit_tokens
from tests.simulator.cluster import SimulatedModel, simulated_replica

BLOCK = 16
LONG_PROMPT = 16_384
# Steps of 200 ms: 128 replicas of 80 sequences each ask for 51,000 tokens a second, which one core can make up.
MODEL = SimulatedModel(
    num_kv_blocks=4096,
    max_model_len=12288,
    max_num_seqs=256,
    step_times=StepTimes(base=0.2, prompt_token=0.0, sequence=0.0),
)
WORKLOAD = Workload("chats", groups=256, skew=0.8, requests=0, prefix=512, suffix=64, output=10_000)


def serve(pipe: Connection, replicas: int) -> None:
    """Run the replicas' process: say where each listens, tell its figures when asked, and end when the pipe does."""

    async def main() -> None:
        cores = [simulated_replica(f"replica-{i:03}", MODEL, incarnation=i + 1) for i in range(replicas)]
        servers = [tcp.LinkServer(core.serve) for core in cores]
        pipe.send([await server.start() for server in servers])
        while await asyncio.to_thread(_asked, pipe):
            stats = [core.stats for core in cores]
            pipe.send((sum(one.prompt_tokens for one in stats), sum(one.prefix_hit_tokens for one in stats)))
        for server in servers:
            await server.close()
        for core in cores:
            await core.close()

    asyncio.run(main())


def _asked(pipe: Connection) -> bool:
    try:
        return bool(pipe.recv())
    except EOFError:
        return False


class TimedChooser(Chooser):
    """Notes how long each choice took: microseconds of CPU time, so that neighbours on the machine do not count."""

    def __init__(self, config: DispatcherConfig, index: PrefixIndex, rng: Random) -> None:
        super().__init__(config, index, rng)
        self.times: list[float] = []

    def choose(self, live: LiveRequest, pool: list[ReplicaHandle]) -> ReplicaHandle:
        """Choose, with a look at the clock."""
        begin = time.thread_time()
        chosen = super().choose(live, pool)
        self.times.append((time.thread_time() - begin) * 1e6)
        return chosen


async def _consume(dispatcher: Dispatcher, request: Request) -> None:
    async for _ in dispatcher.generate(request):
        pass


async def _flood(addresses: list[LinkAddress], pipe: Connection, live: int, seconds: float) -> dict[str, float]:
    """Fill the router with `live` requests, let them run, and return the figures."""
    config = DispatcherConfig(stall_timeout=60.0)
    dispatcher = Dispatcher(config, Random(0))
    chooser = dispatcher._replicas.selection.chooser = TimedChooser(config, dispatcher.caches.index, Random(0))
    for address in addresses:
        dispatcher.add_link(await tcp.connect(address, "bench"))
    workload = Workload(**{**_fields(WORKLOAD), "requests": live})
    prompts = workload.prompts()
    tasks: list[asyncio.Task[None]] = []
    gc.collect()
    resident = psutil.Process().memory_info().rss
    cpu = time.process_time()
    for number, prompt in enumerate(prompts):
        tasks.append(asyncio.create_task(_consume(dispatcher, workload.request(number, prompt))))
        if number % 20 == 19:  # a burst of 20 every few milliseconds, and its first tokens in between
            await asyncio.sleep(0.005)
    filling = time.process_time() - cpu
    while dispatcher.counters.ttft.counts and sum(dispatcher.counters.ttft.counts) < live:
        await asyncio.sleep(0.1)
    figures = {
        "live": float(dispatcher.num_live),
        "choice_us_median": statistics.median(chooser.times),
        "choice_us_p99": statistics.quantiles(chooser.times, n=100)[98],
        "submit_cpu_us": filling / live * 1e6,
        "resident_bytes_per_live": (psutil.Process().memory_info().rss - resident) / live,
        "index_blocks": float(len(dispatcher.caches.index)),
    }
    figures |= await _steady(dispatcher, seconds)
    pipe.send(True)
    asked, hits = await asyncio.to_thread(pipe.recv)
    best = oracle_hit_tokens(prompts, len(addresses) * (MODEL.num_kv_blocks - 1), BLOCK)
    figures |= {"hit_rate": hits / asked, "hit_rate_of_oracle": hits / best}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await dispatcher.close()
    return figures


async def _steady(dispatcher: Dispatcher, seconds: float) -> dict[str, float]:
    """Measure while nothing comes or goes."""
    gc.collect()
    tokens, cpu, begin = dispatcher.counters.tokens, time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    tokens = dispatcher.counters.tokens - tokens
    used, took = time.process_time() - cpu, time.perf_counter() - begin
    return {
        "tokens_per_s": tokens / took,
        "router_cpu_share": used / took,
        "saturated_tokens_per_s": tokens / used,
    }


def _fields(workload: Workload) -> dict[str, object]:
    return {name: getattr(workload, name) for name in workload.__slots__}


def flood(replicas: int, live: int, seconds: float) -> dict[str, float]:
    """Run the two processes."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, replicas), daemon=True)
    process.start()
    theirs.close()
    try:
        return asyncio.run(_flood(ours.recv(), ours, live, seconds))
    finally:
        ours.close()
        process.join(30)


class _NoLink:
    """As much of a link as a member needs to be chosen."""

    closed = False
    incarnation = 1

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.welcome = Welcome(replica_id, 1, "none", 32768, 32000, BLOCK, 10_000)


def choices(replicas: int, cached: str, rounds: int = 300) -> tuple[float, float]:
    """Return microseconds of a choice, median and 99th percentile, for prompts of 16k tokens whose keys are known.

    cached: "nowhere"; at a "home" that has all of it; or "everywhere". The index holds 1,000 other blocks a replica.
    """
    pick = Random(0)
    index = PrefixIndex()
    pool = [ReplicaHandle(_NoLink(f"replica-{i:03}"), 0.0) for i in range(replicas)]
    prompts = [tuple(pick.choices(range(3, 32000), k=LONG_PROMPT)) for _ in range(8)]
    keys = [PromptKeys(prompt, BLOCK) for prompt in prompts]
    for i, member in enumerate(pool):
        own = [pick.getrandbits(64) for _ in range(1000)]
        for n, one in enumerate(keys):
            if cached == "everywhere" or (cached == "home" and n % replicas == i):
                own += one.first(len(one))
        index.update(member.replica_id, 0, own, [])
    chooser = Chooser(DispatcherConfig(), index, pick)
    times = []
    for turn in range(rounds):
        live = LiveRequest(TokenLog(Request("r", prompts[turn % 8], SamplingParams(max_tokens=8))), 0.0)
        live.keys = keys[turn % 8]
        begin = time.thread_time()
        chooser.choose(live, pool)
        times.append((time.thread_time() - begin) * 1e6)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def hash_us(rounds: int = 20) -> float:
    """Return the microseconds to name all blocks of a prompt of 16k tokens."""
    prompt = tuple(Random(0).choices(range(3, 32000), k=LONG_PROMPT))
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        prompt_hashes(prompt, BLOCK)
        times.append((time.thread_time() - begin) * 1e6)
    return statistics.median(times)


def index_bytes_per_block(replicas: int = 128, blocks: int = 2000) -> float:
    """Return what a block takes in the index where each is on one replica, the most that it can take."""
    pick = Random(0)
    batches = [[pick.getrandbits(64) for _ in range(blocks)] for _ in range(replicas)]
    return _traced(lambda: _filled(batches)) / (replicas * blocks)


def _filled(batches: list[list[int]]) -> PrefixIndex:
    index = PrefixIndex()
    for i, batch in enumerate(batches):
        index.update(f"replica-{i:03}", 0, [key ^ 1 for key in batch], [])
    return index


def live_request_bytes(prompt_len: int = 576, tokens: int = 100, count: int = 500) -> float:
    """Return what a live request takes in the router beyond its prompt and its consumer: log, attempt, keys.

    tokens: of its output so far.
    """
    workload = Workload("one", 0, 0.0, count, prefix=prompt_len - 64)
    requests = [workload.request(i, prompt) for i, prompt in enumerate(workload.prompts())]
    member = ReplicaHandle(_NoLink("replica-000"), 0.0)

    def fill() -> list[LiveRequest]:
        made = []
        for i, request in enumerate(requests):
            live = LiveRequest(TokenLog(request), 0.0)
            live.keys = PromptKeys(request.prompt_token_ids, BLOCK)
            live.keys.first(len(live.keys))
            member.attach(live, 16 * i)
            live.log.choices[0].tokens.extend(range(1000, 1000 + tokens))
            made.append(live)
        return made

    return _traced(fill) / count


def _traced(make: Callable[[], object]) -> float:
    tracemalloc.start()
    try:
        kept = make()
        used = tracemalloc.get_traced_memory()[0]
        del kept
    finally:
        tracemalloc.stop()
    return float(used)


def _small(sizes: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    for replicas in sizes:
        for cached in ("nowhere", "home", "everywhere"):
            median, p99 = choices(replicas, cached)
            yield f"choice_us_16k_{cached}_{replicas}", median
            yield f"choice_us_16k_{cached}_{replicas}_p99", p99
    yield "hash_us_16k", hash_us()
    yield "index_bytes_per_block", index_bytes_per_block()
    yield "live_request_bytes", live_request_bytes()


def measure(replicas: int = 128, live: int = 2000, seconds: float = 5.0) -> dict[str, float]:
    """Return the figures by name."""
    flooded = flood(
        replicas, live, seconds
    )  # first: memory that others left would be filled, and not be seen to grow
    return dict(_small((4, 32, 128))) | flooded


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=128)
    parser.add_argument("--live", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    for name, value in measure(**vars(parser.parse_args())).items():
        print(f"{name:36} {value:14,.3f}")


if __name__ == "__main__":
    main()
