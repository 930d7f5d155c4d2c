"""How far one must walk to read Squadron: the house (`tests.bench.house`), and the files behind a step and a request.

    python -m tests.bench.walk [--output walk.json]

A walk lists the product files whose functions are called, in the order of the first call, and how often: a profile
hook sees each call on each thread. A generator or coroutine that goes on counts as called again, a lambda or a
comprehension as a function; what has no file (the `__init__` of dataclasses) is not seen.

- *decode*: one `EngineCore.step` of the demo model on the CPU, in which eight sequences draw a token each; one
  of them fills a block and another begins one. *decode of two ranks*: the same in rank 0's process.
- *chat*: one streamed chat request, from its arrival at the ASGI app to its last frame, through the in-process server
  of `tests.clients.server`: all of router and replica, but neither Ray, nor the proxy, nor sockets. A first request
  fills what is cached and is not walked. Of some after it the one with the fewest calls is told, without the files
  that not all of them call: what a timer did meanwhile belongs to no request.

`layers` of a walk are the files of the model's arithmetic: those below the folders in `LAYERS`, and those of
parallel/ that speak of torch's `nn`. The others are `rest`: they decide what is computed, and carry it about. Of the
chat's rest, `outside_the_step` are those that a decode step does not call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Column, Table

from cluster.config import resolve_config
from deploy.demo import demo_model_path
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.executor_start import build_executor
from tests.bench.house import count_house, is_product
from tests.clients.model import write_model
from tests.clients.server import MODEL, app_around

ROOT = Path(__file__).parents[2]
LAYERS = ("engine/models/", "engine/layers/", "engine/quantization/", "engine/attention/", "engine/kernels/")
SEQUENCES = 8
BLOCK = 16
STEPS_BEFORE = 28  # of decoding; in the next, with these prompts, a block is filled and one is begun
REQUESTS = 16  # that are walked, after one that is not; short ones, so that timers leave some of them alone
CHAT = {"model": MODEL, "stream": True, "max_tokens": 8, "ignore_eos": True, "seed": 1}
Calls = dict[str, int]  # by path from the root, in the order of the first


class Walk:
    """Hears, while `hooked`, of each call on this thread and on those that are started; keeps those of a stretch."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = f"{root}/"
        self._called: list[str] = []  # one list, since to append is one act whatever thread does it
        self._on = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Listen to this thread, and to those that it and others start from now on."""
        before, before_of_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before_of_threads)

    def begin(self) -> None:
        """Forget what was heard, and keep what comes."""
        self._called.clear()
        self._on = True

    def end(self) -> Calls:
        """Keep nothing more; return the calls of product files since `begin`."""
        self._on = False
        below = (name.removeprefix(self._root) for name in self._called)
        return dict(Counter(path for path in below if is_product(path)))

    def _hook(self, frame: FrameType, event: str, _: object) -> None:
        if self._on and event == "call":
            self._called.append(frame.f_code.co_filename)


def walk_decode(ranks: int = 1) -> Calls:
    """Walk a decode step of a group of so many ranks; the first is this process, and its the walk."""
    config = EngineConfig(
        str(demo_model_path()),
        tensor_parallel_size=ranks,
        device="cpu",
        max_model_len=8 * BLOCK,
        max_num_seqs=SEQUENCES,
        block_size=BLOCK,
        num_kv_blocks=8 * SEQUENCES + 1,
    )
    walk = Walk()
    with walk.hooked():
        executor, info = build_executor(config)
        core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
        try:
            for i in range(SEQUENCES):
                params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=2 * STEPS_BEFORE, ignore_eos=True)
                core.add(Request(f"r{i}", tuple(range(10 + i, 26 + 2 * i)), params, seed=i))
            while core.stats().outstanding_tokens:
                core.step()
            for _ in range(STEPS_BEFORE):
                core.step()
            walk.begin()
            report = core.step()
            calls = walk.end()
        finally:
            core.close()
    if len(report.token_ids) != SEQUENCES or report.finished:
        raise RuntimeError(f"the step drew {len(report.token_ids)} tokens and ended {len(report.finished)} sequences")
    return calls


async def walk_chat() -> Calls:
    """Walk a streamed chat request, router and replica in this process."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder, walk.hooked():
        model = str(write_model(Path(folder) / MODEL))
        config = resolve_config({"model": model, "served_model_name": MODEL, "device": "cpu"})
        async with app_around(config) as app:
            walked = [await _request(app, walk, number) for number in range(1 + REQUESTS)][1:]
    calm = min(walked, key=lambda calls: sum(calls.values()))
    return {path: count for path, count in calm.items() if all(path in calls for calls in walked)}


async def _request(app: Any, walk: Walk, number: int) -> Calls:
    """Walk a request that nobody sent before; raises `RuntimeError` unless it is streamed to its end."""
    chat = {**CHAT, "messages": [{"role": "user", "content": f"What is queue {number} for?"}]}
    found: list[Calls] = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                found.append(walk.end())

        walk.begin()
        await app(scope, receive, sending)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(watched), base_url="http://localhost") as client:
        answer = await client.post("/v1/chat/completions", json=chat)
    if answer.status_code != 200 or not answer.text.endswith("data: [DONE]\n\n"):
        raise RuntimeError(f"no whole stream: {answer.status_code} {answer.text}")
    return found[0]


def is_layer(path: str, root: Path = ROOT) -> bool:
    """Whether a product file is of the model's arithmetic, by the rule above."""
    if path.startswith("parallel/"):
        return re.search(r"\bnn\b", (root / path).read_text(encoding="utf-8")) is not None
    return path.startswith(LAYERS)


def told(calls: Calls, step: Calls | None = None) -> dict[str, Any]:
    """Return the figures of a walk. step: the walk of a decode step, whose files are told apart."""
    layers = {path: count for path, count in calls.items() if is_layer(path)}
    rest = {path: count for path, count in calls.items() if path not in layers}
    folders = Counter(path.rpartition("/")[0] for path in calls)
    figures = {"files": len(calls), "files_of_layers": len(layers), "files_of_rest": len(rest)}
    if step is not None:
        figures["files_outside_the_step"] = len(rest.keys() - step.keys())
    return figures | {"calls": sum(calls.values()), "files_by_folder": dict(folders), "layers": layers, "rest": rest}


def walk_table(title: str, walk: dict[str, Any]) -> Table:
    """Lay out a walk."""
    counts = f"{walk['files']} files, {walk['files_of_layers']} of layers; {walk['calls']:,} calls"
    if "files_outside_the_step" in walk:
        counts += f"; {walk['files_outside_the_step']} neither of layers nor of a decode step"
    table = Table("", Column("file", no_wrap=True), Column("calls", justify="right"), title=f"{title}: {counts}")
    for part in ("rest", "layers"):
        table.add_section()
        for path, count in walk[part].items():
            table.add_row(part, path, f"{count:,}")
    return table


def house_tables(house: dict[str, Any]) -> Iterator[Table]:
    """Lay out the house."""
    table = Table("house", Column("", justify="right"))
    for name in ("files", "generated_files", "lines", "files_under_60_lines"):
        table.add_row(name.replace("_", " "), f"{house[name]:,}")
    for name in ("files_by_room", "lines_by_room", "imports", "long_functions", "files_by_folder"):
        table.add_section()
        for key, value in house[name].items():
            table.add_row(f"{name.replace('_', ' ')}: {key}", f"{value:,}")
    yield table
    table = Table("circles of", "by imports", Column("circles", justify="right"), "their members", show_lines=True)
    groups = {"files": house["file_circles"]}
    for room, found in house["package_circles"].items():
        groups |= {f"{room}'s folders, with {room} itself": found["with_the_room"]}
        groups |= {f"{room}'s folders, without it": found["without_it"]}
    for group, by_graph in groups.items():
        for (graph, found), before in zip(by_graph.items(), [None, *by_graph.values()], strict=False):
            if found != before:  # what an import that stands elsewhere does not change is not told again
                members = "\n".join(f"{len(circle)}: {', '.join(circle)}" for circle in found)
                table.add_row(group, graph, str(len(found)), members)
    for room, found in house["package_circles"].items():
        pairs = "\n".join(" and ".join(pair) for pair in found["pairs"])
        table.add_row(f"{room}'s folders, pairs that import each other", "at import", str(len(found["pairs"])), pairs)
    yield table


def main() -> None:
    """Count, walk, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    house = count_house(ROOT)
    step = walk_decode()
    walks = {"decode": told(step), "decode_of_two_ranks": told(walk_decode(2))}
    walks["chat"] = told(asyncio.run(walk_chat()), step)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(*house_tables(house))
    for name, walk in walks.items():
        console.print(walk_table(name.replace("_", " "), walk))
    if output is not None:
        output.write_text(json.dumps({"house": house, **walks}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
