"""What Serve, router and HTTP add to the bare engine: time to first token, and tokens per second of 32 streams.

    python -m tests.bench.served [--rounds 40] [--ingress serve haproxy]

The demo model on one rank and one CPU thread, the same prompts and the same lengths each time: by `EngineCore` in a
process of its own, all requests added at once, and by the OpenAI endpoint of a real Ray Serve app, each request a
stream of its own, through Serve's proxy (`served_...`) and through HAProxy (`haproxy_...`, where it is installed). A
client on the same cores reads raw sockets. Prompts differ from round to round, so that no prefix is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch

from cluster.config import INGRESSES, parse_config
from deploy.demo import demo_model_path
from deploy.haproxy import prepare_haproxy
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.executor_start import build_executor
from engine.request import Request
from engine.sampling_params import SamplingParams

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 200
STREAMS = (1, 8, 32)
HEALTH_ROUNDS = 200
NAMES = {"serve": "served", "haproxy": "haproxy"}  # of figures, by ingress
NUM_THREADS = 1  # what Ray gives to a replica with `--cpus-per-worker 1`
Figures = dict[str, float]


def prompt(number: int) -> list[int]:
    """Return a prompt that no other number has, in the ids of the demo model's vocabulary."""
    return [300 + (number * 7919 + place * 104729) % 3000 for place in range(PROMPT_TOKENS)]


def bare(rounds: int, pipe: Connection) -> None:
    """Send the figures of the engine alone."""
    torch.set_num_threads(NUM_THREADS)
    executor, info = build_executor(EngineConfig(str(demo_model_path()), device="cpu"))
    core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
    figures: Figures = {}
    number = 0
    for streams in STREAMS:
        firsts: list[float] = []
        rates: list[float] = []
        for _ in range(max(3, rounds // streams)):
            numbers = range(number, number + streams)
            number += streams
            waits, rate = _run_bare(core, numbers)
            firsts += waits
            rates.append(rate)
        figures |= _named("engine", streams, firsts, rates)
    core.close()
    pipe.send(figures)


def _run_bare(core: EngineCore, numbers: range) -> tuple[list[float], float]:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    for number in numbers:
        core.add(Request(f"r{number}", tuple(prompt(number)), params))
    waits: dict[str, float] = {}
    tokens = 0
    while core.has_unfinished:
        report = core.step()
        now = time.perf_counter()
        tokens += len(report.token_ids)
        for sequence in report.sequences:
            waits.setdefault(sequence.request.request_id, now - began)
    return list(waits.values()), tokens / (time.perf_counter() - began)


async def served(port: int, rounds: int, name: str) -> Figures:
    """Return the figures of the endpoint, which `name` begins."""
    figures: Figures = {f"{name}_health_ms": await _health(port)}
    number = 1_000_000
    await asyncio.gather(*[_stream(port, number - 1 - i) for i in range(4)])
    for streams in STREAMS:
        firsts: list[float] = []
        rates: list[float] = []
        for _ in range(max(3, rounds // streams)):
            began = time.perf_counter()
            firsts += await asyncio.gather(*[_stream(port, number + i) for i in range(streams)])
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
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"live"}')
        took.append(time.perf_counter() - began)
    writer.close()
    return 1e3 * statistics.median(took)


async def _stream(port: int, number: int) -> float:
    """Read one stream to its end; return the seconds to its first token."""
    asked = {"model": "demo", "prompt": prompt(number), "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    body = json.dumps({**asked, "temperature": 0, "stream": True, "return_token_ids": True}).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
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


def measure(rounds: int = 40, ingresses: Sequence[str] = INGRESSES) -> Figures:
    """Return the figures by name, and what is added: milliseconds to the first token, share of the tokens/s."""
    figures = _in_a_process(bare, rounds)
    for ingress in ingresses:
        name = NAMES[ingress]
        figures |= _in_a_process(serve_and_ask, rounds, ingress)
        for streams in STREAMS if f"{name}_health_ms" in figures else ():
            added = figures[f"{name}_ttft_ms_{streams}"] - figures[f"engine_ttft_ms_{streams}"]
            share = figures[f"{name}_tokens_per_s_{streams}"] / figures[f"engine_tokens_per_s_{streams}"]
            figures[f"{'router' if ingress == 'serve' else name}_added_ttft_ms_{streams}"] = added
            figures[f"{name}_share_of_engine_{streams}"] = share
    return figures


def _in_a_process(target: Callable[..., None], *arguments: object) -> Figures:
    """Ray reads its settings when it is imported, so that each ingress needs a fresh interpreter."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    figures: Figures = mine.recv()
    process.join()
    return figures


def serve_and_ask(rounds: int, ingress: str, pipe: Connection) -> None:
    """Start Ray and the app, and send the figures; none where the ingress is not installed."""
    try:
        haproxy = prepare_haproxy(parse_config({"model": "demo"})) if ingress == "haproxy" else None
    except ConfigError as error:
        print(f"not measured: {error}")
        pipe.send({})
        return
    import ray
    from ray import serve

    from tests.cluster.harness import deploy, start_ray, start_serve

    start_ray()
    try:
        app = deploy(start_serve(), model="demo", replicas=1, ingress=ingress)
        pipe.send(asyncio.run(served(app.port, rounds, NAMES[ingress])))
    finally:
        serve.shutdown()
        ray.shutdown()
        if haproxy is not None:
            haproxy.remove()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ingress", nargs="+", choices=INGRESSES, default=INGRESSES)
    given = parser.parse_args()
    for name, value in measure(given.rounds, given.ingress).items():
        print(f"{name:40} {value:12.2f}")


if __name__ == "__main__":
    main()
