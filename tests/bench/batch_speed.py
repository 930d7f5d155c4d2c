"""Batch tokens/s against the same engine offline, and against rows one by one: `python -m tests.bench.batch_speed`.

One replica of one rank each time, the demo model, the same rows; the machine's cores are shared by all that runs. A
run counts from its first row to its last: starts are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import ray
from ray import serve
from rich.console import Console
from rich.table import Table

from engine.device.machine import cores
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.bench.machine import provenance
from tests.bench.random_model import VOCAB, make_load, save_random_model
from tests.chaos.batch import BatchProcess, write_rows
from tests.e2e.harness import deploy, start_ray, start_serve


def plain_rows(count: int, tokens: int) -> list[dict[str, Any]]:
    """Short prompts of all lengths, each answered with `tokens` tokens."""
    rng = Random(0)
    words = ["def", "class", "import", "return", "for", "while", "with", "try:", "self", "None"]
    prompts = [" ".join(rng.choices(words, k=rng.randrange(3, 20))) + f" {i}" for i in range(count)]
    return [_row(i, prompt, tokens) for i, prompt in enumerate(prompts)]


def shared_rows(count: int, groups: int = 16, shared: int = 256) -> list[dict[str, Any]]:
    """Random ids: `groups` beginnings of `shared` tokens, in an order that brings each round again and again."""
    rng = Random(0)
    beginnings = [rng.choices(range(10, VOCAB), k=shared) for _ in range(groups)]
    return [_row(i, beginnings[i % groups] + rng.choices(range(10, VOCAB), k=8), 16) for i in range(count)]


def _row(number: int, prompt: str | list[int], tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def drawn_rows(count: int) -> list[dict[str, Any]]:
    """Random ids of the random model's vocabulary, of all lengths, and outputs of all lengths."""
    load = make_load(VOCAB, count)
    pairs = zip(load.prompts, load.outputs, strict=True)
    return [_row(i, prompt, length) for i, (prompt, length) in enumerate(pairs)]


def on_random_model(measure: Callable[[list[dict[str, Any]], str], float], rows: int) -> float:
    """Measure with a model of 100M parameters: what a batch adds to a step weighs less there."""
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder))
        return measure(drawn_rows(rows), folder)


def offline(rows: list[dict[str, Any]], model: str = "deploy/demo_model") -> float:
    """Seconds of `LLM.generate`."""
    params = [
        SamplingParams(max_tokens=one["body"]["max_tokens"], temperature=0, ignore_eos=True, seed=0) for one in rows
    ]
    with LLM(model) as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        began = time.perf_counter()
        llm.generate([one["body"]["prompt"] for one in rows], params, use_tqdm=False)
        return time.perf_counter() - began


def batch(rows: list[dict[str, Any]], model: str = "demo", *flags: str) -> float:
    """Seconds of `squadron batch`, from its first row to its last."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        path = write_rows(home / "rows.jsonl", rows)
        # Ray gives an actor as many threads as it has CPUs; offline the engine has all of the machine's.
        threads = ("--cpus-per-worker", str(cores()))
        arguments = (str(path), str(home / "out.jsonl"), "--model", model, *threads, *flags)
        process = BatchProcess(*arguments, home=home)
        if process.wait() != 0:
            raise RuntimeError(process.text)
        found = re.search(r"of rows ([\d.]+) s", process.text)
        if found is None:
            raise RuntimeError(process.text)
        return float(found[1])


def one_by_one(rows: list[dict[str, Any]]) -> float:
    """Seconds of rows sent through HTTP, each after the answer to the one before."""
    start_ray()
    try:
        app = deploy(start_serve(), model="demo", cpus_per_worker=1)
        with httpx.Client(base_url=app.url, timeout=60) as client:
            client.post("/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": 2}).raise_for_status()
            began = time.perf_counter()
            for one in rows:
                client.post(one["url"], json={**one["body"], "model": "demo"}).raise_for_status()
            return time.perf_counter() - began
    finally:
        serve.shutdown()
        ray.shutdown()


def apart(kind: str, rows: int, tokens: int) -> float:
    """Run one measurement in a process of its own; return its seconds."""
    command = [sys.executable, "-m", "tests.bench.batch_speed", "--one", kind, "--rows", str(rows)]
    done = subprocess.run([*command, "--tokens", str(tokens)], check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def shared(rows: int, *flags: str) -> float:
    """Seconds of a batch of shared beginnings, with a cache that holds half of them."""
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder))
        return batch(shared_rows(rows), folder, "--num-kv-blocks", "128", *flags)


KINDS: dict[str, Callable[[int, int], float]] = {
    "offline": lambda rows, tokens: offline(plain_rows(rows, tokens)),
    "batch": lambda rows, tokens: batch(plain_rows(rows, tokens)),
    "offline, 100M": lambda rows, _: on_random_model(offline, rows // 8),
    "batch, 100M": lambda rows, _: on_random_model(batch, rows // 8),
    "one by one": lambda rows, tokens: one_by_one(plain_rows(rows, tokens)[: rows // 16]),
    "grouped": lambda rows, _: shared(rows // 4),
    "ungrouped": lambda rows, _: shared(rows // 4, "--lookahead", "1"),
}


# Speed of the second run over that of the first, and how many times as many rows it had.
RATIOS = {
    "batch / offline": ("offline", "batch", 1),
    "batch / offline, 100M": ("offline, 100M", "batch, 100M", 1),
    "batch / one by one": ("one by one", "batch", 16),
    "grouped / ungrouped": ("ungrouped", "grouped", 1),
}


def main() -> None:
    """Run all, one after the other, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--one", choices=list(KINDS), help="run one measurement, and print its seconds")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if options.one:
        print(KINDS[options.one](options.rows, options.tokens))
        return
    seconds = {kind: apart(kind, options.rows, options.tokens) for kind in KINDS}
    table = Table("run", "seconds", title=f"{options.rows} rows, {options.tokens} tokens each")
    for kind, took in seconds.items():
        table.add_row(kind, f"{took:.1f}")
    table.add_section()
    for name, (one, other, factor) in RATIOS.items():
        table.add_row(name, f"{factor * seconds[one] / seconds[other]:.2f}")
    Console().print(table)
    if options.output:
        options.output.write_text(json.dumps({"seconds": seconds, **provenance()}, indent=2))


if __name__ == "__main__":
    main()
