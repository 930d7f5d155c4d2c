"""What Serve, router and HTTP add to the bare engine: time to first token, and tokens per second of 32 streams.

    python -m tests.bench.served [--rounds 40] [--ingress serve gateway]

The demo model on one rank and one CPU thread, the same prompts and the same lengths each time: by the OpenAI endpoint
of a real Ray Serve app, each request a stream of its own, through Serve's proxy (`served_...`) and through a gateway
of ours (`gateway_...`), and by `EngineCore` in a process of its own. A client on the same cores reads raw sockets.
Prompts differ from round to round, so that no prefix is cached.

The engine is offered its requests twice: all at once (`engine_...`), and one after the other as they came to the
replica's engine behind that ingress (`engine_as_served_...`, `engine_as_gateway_...`): what is added is told of
these. When they came there is known of the spans of rounds of their own, as tracing is off in what is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cluster.config_values import GATEWAY, SERVE
from deploy.demo import demo_model_path
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.executor_start import build_executor

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 200
STREAMS = (1, 8, 32)
HEALTH_ROUNDS = 200
NAMES = {SERVE: "served", GATEWAY: "gateway"}  # of figures, by ingress
NUM_THREADS = 1  # what Ray gives to a replica with `--cpus-per-worker 1`
ARRIVAL_ROUNDS = 5
Figures = dict[str, float]
Arrivals = dict[int, list[float]]  # seconds of each request, by number of streams


def prompt(number: int) -> list[int]:
    """Return a prompt that no other number has, in the ids of the demo model's vocabulary."""
    return [300 + (number * 7919 + place * 104729) % 3000 for place in range(PROMPT_TOKENS)]


def bare(rounds: int, offered: Mapping[str, Arrivals], pipe: Connection) -> None:
    """Send the figures of the engine alone, for each way in which its requests are `offered`, by name."""
    torch.set_num_threads(NUM_THREADS)
    executor, info = build_executor(EngineConfig(str(demo_model_path()), device="cpu"))
    core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
    figures: Figures = {}
    numbers = itertools.count()
    for streams in STREAMS:
        for name, arrivals in offered.items():
            firsts: list[float] = []
            rates: list[float] = []
            for _ in range(max(3, rounds // streams)):
                waits, rate = run_bare(core, list(itertools.islice(numbers, streams)), arrivals[streams])
                firsts += waits
                rates.append(rate)
            figures |= _named(name, streams, firsts, rates)
    core.close()
    pipe.send(figures)


def run_bare(core: EngineCore, numbers: Sequence[int], arrivals: Sequence[float]) -> tuple[list[float], float]:
    """Offer each request at its time, in seconds from now; return how long each waited for a token, and tokens/s.

    One that comes during a step is taken when that is over, as a replica does.
    """
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    due = {f"r{number}": seconds for number, seconds in zip(numbers, arrivals, strict=True)}
    coming = deque(zip(numbers, arrivals, strict=True))
    waits: dict[str, float] = {}
    tokens = 0
    began = time.perf_counter()
    while coming or core.has_unfinished:
        while coming and coming[0][1] <= time.perf_counter() - began:
            number, _ = coming.popleft()
            core.add(Request(f"r{number}", tuple(prompt(number)), params))
        if not core.has_unfinished:
            time.sleep(max(0.0, coming[0][1] - (time.perf_counter() - began)))
            continue
        report = core.step()
        now = time.perf_counter() - began
        tokens += len(report.token_ids)
        for sequence in report.sequences:
            name = sequence.request.request_id
            waits.setdefault(name, now - due[name])
    return list(waits.values()), tokens / (time.perf_counter() - began)


async def served(port: int, rounds: int, name: str) -> Figures:
    """Return the figures of the endpoint, which `name` begins."""
    figures: Figures = {f"{name}_health_ms": await _health(port)}
    number = 1_000_000
    await asyncio.gather(*[stream(port, number - 1 - i) for i in range(4)])
    for streams in STREAMS:
        firsts: list[float] = []
        rates: list[float] = []
        for _ in range(max(3, rounds // streams)):
            began = time.perf_counter()
            firsts += await asyncio.gather(*[stream(port, number + i) for i in range(streams)])
            rates.append(streams * OUTPUT_TOKENS / (time.perf_counter() - began))
            number += streams
        figures |= _named(name, streams, firsts, rates)
    return figures


async def _health(port: int) -> float:
    """Return the median milliseconds of `/health` on one connection: what a request costs that asks nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took = []
    for _ in range(HEALTH_ROUNDS):
        began = time.perf_counter()
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b'{"status":"live"}')
        took.append(time.perf_counter() - began)
    writer.close()
    return 1e3 * statistics.median(took)


async def stream(port: int, number: int) -> float:
    """Read one stream to its end; return the seconds to its first token."""
    asked = {"model": "demo", "prompt": prompt(number), "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    body = json.dumps({**asked, "temperature": 0, "stream": True, "return_token_ids": True}).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    data = await reader.readuntil(b"data: {")
    first = time.perf_counter() - began
    while b"[DONE]" not in data:
        more = await reader.read(65536)
        if not more:
            raise RuntimeError(f"the stream ended early: {data!r}")
        data = data[-200:] + more
    writer.close()
    return first


def _named(what: str, streams: int, firsts: list[float], rates: list[float]) -> Figures:
    return {
        f"{what}_ttft_ms_{streams}": 1e3 * statistics.median(firsts),
        f"{what}_tokens_per_s_{streams}": statistics.median(rates),
    }


def measure(rounds: int = 40, ingresses: Sequence[str] = tuple(NAMES)) -> Figures:
    """Return the figures by name, and what is added: milliseconds to the first token, share of the tokens/s."""
    figures: Figures = {}
    offered: dict[str, Arrivals] = {"engine": {streams: [0.0] * streams for streams in STREAMS}}
    for ingress in ingresses:
        name, (asked, came) = NAMES[ingress], _in_a_process(serve_and_ask, rounds, ingress)
        figures |= asked | {f"{name}_arrivals_ms_{streams}": 1e3 * times[-1] for streams, times in came.items()}
        offered[f"engine_as_{name}"] = came
    figures |= _in_a_process(bare, rounds, offered)
    for ingress in ingresses:
        name = NAMES[ingress]
        alone = f"engine_as_{name}"
        for streams in STREAMS:
            added = figures[f"{name}_ttft_ms_{streams}"] - figures[f"{alone}_ttft_ms_{streams}"]
            share = figures[f"{name}_tokens_per_s_{streams}"] / figures[f"{alone}_tokens_per_s_{streams}"]
            figures[f"{'router' if ingress == SERVE else name}_added_ttft_ms_{streams}"] = added
            figures[f"{name}_share_of_engine_{streams}"] = share
    return figures


def _in_a_process(target: Callable[..., None], *arguments: object) -> Any:
    """Ray reads its settings when it is imported, so that each ingress needs a fresh interpreter."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    found = mine.recv()
    process.join()
    return found


def serve_and_ask(rounds: int, ingress: str, pipe: Connection) -> None:
    """Start Ray and the app; send figures and when requests come to the engine."""
    import ray
    from ray import serve

    from tests.e2e.harness import deploy, free_port, start_ray, start_serve

    start_ray()
    try:
        port = free_port() if ingress == GATEWAY else start_serve()
        settings = {"model": "demo", "replicas": 1, "ingress": ingress}
        figures = asyncio.run(served(deploy(port, **settings).port, rounds, NAMES[ingress]))
        with tempfile.TemporaryDirectory() as folder:
            spans = Path(folder, "spans.jsonl")
            deploy(port, **settings, otlp_traces_endpoint=spans.as_uri())
            pipe.send((figures, asyncio.run(arrivals(port, spans))))
    finally:
        serve.shutdown()
        ray.shutdown()


async def arrivals(port: int, spans: Path) -> Arrivals:
    """Return when requests that are sent at once come to the replica's engine, in seconds after the first of them.

    In order, by number of streams: the medians of some rounds.
    """
    number = 2_000_000
    await _asked(port, spans, range(number - 4, number))
    found: Arrivals = {}
    for streams in STREAMS:
        rounds = []
        for _ in range(ARRIVAL_ROUNDS):
            times = await _asked(port, spans, range(number, number + streams))
            number += streams
            rounds.append([one - times[0] for one in times])
        found[streams] = [statistics.median(times) for times in zip(*rounds, strict=True)]
    return found


async def _asked(port: int, spans: Path, numbers: range) -> list[float]:
    """Ask for all of them at once; return when each came to the engine."""
    known = len(queued(spans))
    await asyncio.gather(*[stream(port, number) for number in numbers])
    while len(found := queued(spans)) < known + len(numbers):  # spans are written some time after the end
        await asyncio.sleep(0.1)
    return found[known:]


def queued(spans: Path) -> list[float]:
    """Return when each request came to a replica's engine, by the spans in a file: ascending, as of `time.time`."""
    lines = spans.read_text(encoding="utf-8").splitlines() if spans.is_file() else []
    found = [json.loads(line) for line in lines]
    return sorted(datetime.fromisoformat(span["start_time"]).timestamp() for span in found if span["name"] == "queue")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ingress", nargs="+", choices=tuple(NAMES), default=tuple(NAMES))
    given = parser.parse_args()
    for name, value in measure(given.rounds, given.ingress).items():
        print(f"{name:40} {value:12.2f}")


if __name__ == "__main__":
    main()
