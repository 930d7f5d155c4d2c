"""Tokens per second through the router's dispatcher for 32 streams, with an engine whose model costs nothing.

    python -m tests.bench.router [--streams 32] [--tokens 2000] [--seconds 4]

Figures: the replica in a process of its own behind a TCP link; replica and router in one process; and the
microseconds that the dispatcher needs for one report, without consumers. Everything is real but the tokens:
scheduler, engine thread, reports, link, token logs, a consumer task per stream.

An engine that computes nothing is ahead of the router, whose consumers then get several tokens in a chunk
(`router_tokens_per_chunk_...`): that is a rate of tokens, not of chunks. `router_single_tokens_per_s_...` is the
highest rate found at which nearly every token comes in a chunk of its own, as from a real model: the engine is slowed
down to where its steps can be followed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

from typing_extensions import override

from cluster.replica.core import ReplicaCore
from cluster.replica.sessions import ReplicaFacts
from cluster.router.counters import DispatcherCounters
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.replica_handle import LiveRequest, ReplicaHandle
from cluster.router.token_log import TokenLog
from cluster.wire import tcp
from cluster.wire.codec import decode_down, encode
from cluster.wire.link import LinkAddress, ReplicaLink
from cluster.wire.parts import Load
from cluster.wire.replica_messages import Report, Welcome
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.report import SamplingInputs, StepInputs
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.executor import Pending
from tests.bench.host_step import VOCAB, ReadyTokens
from tests.simulator.links import connect_local

BLOCKS = 40_000
SINGLE = 1.05  # tokens per chunk that still count as one
SHORTEST, LONGEST, SEARCHES = 50e-6, 20e-3, 7  # seconds of a step, between which the shortest is searched


class PacedTokens(ReadyTokens):
    """Begins a step every so many seconds, as long as it is asked in time."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self._every = step
        self._due = 0.0

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        now = time.perf_counter()
        self._due = max(self._due + self._every, now)
        time.sleep(self._due - now)
        return super().launch(inputs, sampling)


def _replica(step: float = 0.0) -> ReplicaCore:
    config = EngineConfig("none", max_model_len=8192, max_num_seqs=256)
    facts = ReplicaFacts("bench", "none", 8192, VOCAB, config.block_size, BLOCKS - 1)
    executor = PacedTokens(step) if step else ReadyTokens()
    return ReplicaCore(EngineCore(config, executor, (2,), VOCAB, BLOCKS), facts)


def _serve(pipe: Connection, step: float) -> None:
    """The replica's process: says where it listens, and ends when the pipe does."""

    async def main() -> None:
        replica = _replica(step)
        server = tcp.LinkServer(replica.serve)
        pipe.send(await server.start())
        await asyncio.to_thread(pipe.poll, None)
        await server.close()
        await replica.close()

    asyncio.run(main())


async def _consume(dispatcher: Dispatcher, request: Request) -> tuple[int, int]:
    tokens = chunks = 0
    async for chunk in dispatcher.generate(request):
        tokens += len(chunk.token_ids)
        chunks += 1
    return tokens, chunks


async def _stream(link: ReplicaLink, streams: int, tokens: int, seconds: float) -> tuple[float, float]:
    """Return tokens per second and tokens per chunk over waves of `streams` requests, after one to warm up."""
    dispatcher = Dispatcher(DispatcherConfig(max_pending_tokens=10**6))
    dispatcher.add_link(link)
    done = chunks = wave = 0
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds or wave < 2:
        if wave == 1:
            done, chunks, begin = 0, 0, time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompts = [tuple(range(3 + i, 35 + i)) for i in range(streams)]
        requests = [Request(f"r{wave}.{i}", prompt, params) for i, prompt in enumerate(prompts)]
        for got, parts in await asyncio.gather(*(_consume(dispatcher, request) for request in requests)):
            done += got
            chunks += parts
        wave += 1
    await dispatcher.close()
    return done / elapsed, done / chunks


async def local_tokens_per_s(streams: int, tokens: int, seconds: float) -> tuple[float, float]:
    """Measure with replica and router in one process."""
    replica = _replica()
    figures = await _stream(await connect_local(replica.serve, "bench"), streams, tokens, seconds)
    await replica.close()
    return figures


async def remote_tokens_per_s(streams: int, tokens: int, seconds: float, step: float = 0.0) -> tuple[float, float]:
    """Measure with the replica in a process of its own, behind a TCP link. step: seconds that its steps take."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, step), daemon=True)
    process.start()
    theirs.close()
    try:
        address: LinkAddress = await asyncio.to_thread(ours.recv)
        return await _stream(await tcp.connect(address, "bench"), streams, tokens, seconds)
    finally:
        ours.close()
        process.join(10)


async def single_tokens_per_s(streams: int, seconds: float) -> tuple[float, float]:
    """Return tokens/s and tokens per chunk at the shortest step with which nearly every token has its own chunk."""
    low, high = SHORTEST, LONGEST
    best = 0.0, 0.0
    for _ in range(SEARCHES):
        step = (low * high) ** 0.5
        rate, size = await remote_tokens_per_s(streams, max(16, int(seconds / step / 4)), seconds, step)
        if size <= SINGLE:
            best, high = max(best, (rate, size)), step
        else:
            low = step
    return best


class _NoLink:
    """As much of a link as a member needs to read reports."""

    welcome = Welcome("bench", 1, "none", 8192, VOCAB, 16, BLOCKS)
    replica_id, incarnation = "bench", 1


def report_us(streams: int, rounds: int = 20_000) -> float:
    """Return the microseconds to decode one report and put its tokens into the logs."""
    member, counters = ReplicaHandle(_NoLink(), 0.0), DispatcherCounters()
    keys = [16 * i for i in range(streams)]
    for i, key in enumerate(keys):
        request = Request(f"r{i}", (1,), SamplingParams(max_tokens=None))
        member.attach(LiveRequest(TokenLog(request), 0.0), key)
    for choice in member.streams.values():
        choice.check_at = 10**9
    load = Load(1, 2, 300, 4000, 500, 600, 7000, 800, 9, 10**6, 10**6, 0.0)
    frames = [
        encode(Report(i, 1, i, keys, [i] * streams, list(range(1000, 1000 + streams)), load)) for i in range(rounds)
    ]
    begin = time.perf_counter()
    for frame in frames:
        member.read(decode_down(frame), counters)
    return (time.perf_counter() - begin) / rounds * 1e6


def measure(streams: int = 32, tokens: int = 2000, seconds: float = 4.0) -> dict[str, float]:
    """Return the figures by name."""
    figures: dict[str, float] = {}
    for name, measured in (
        ("router", remote_tokens_per_s(streams, tokens, seconds)),
        ("router_local", local_tokens_per_s(streams, tokens, seconds)),
    ):
        rate, size = asyncio.run(measured)
        figures |= {f"{name}_tokens_per_s_{streams}": rate, f"{name}_tokens_per_chunk_{streams}": size}
    rate, size = asyncio.run(single_tokens_per_s(streams, seconds / 2))
    figures |= {f"router_single_tokens_per_s_{streams}": rate, f"router_single_tokens_per_chunk_{streams}": size}
    return figures | {f"router_report_us_{streams}": report_us(streams)}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=4.0)
    for name, value in measure(**vars(parser.parse_args())).items():
        print(f"{name:40} {value:12,.1f}")


if __name__ == "__main__":
    main()
