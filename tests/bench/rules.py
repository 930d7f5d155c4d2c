"""What rules of sampling cost a step: `python -m tests.bench.rules`.

Whole steps of an engine with a model of one small layer, so that what is left is what the host prepares and what is
drawn. All rows of a case have its rule; "none" is beside them. Figures are medians of milliseconds of CPU time of the
process, and of the part of it that prepares the inputs; and the peak of Python's allocations in a step, in MB.
Run it on two trees in turn to compare them.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.local_executor import SoloExecutor
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.bench.random_model import save_random_model

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 32,
}
LONG = 32_000
CASES = ("none", "penalties", "penalties, one row of 32k", "128 bad words", "4096 allowed ids")


def params_of(case: str, pick: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Return the rule of one request."""
    if case.startswith("penalties"):
        return {"repetition_penalty": 1.1, "frequency_penalty": 0.1}
    if case == "128 bad words":
        words = [tuple(pick.integers(10, vocab, pick.integers(1, 5)).tolist()) for _ in range(128)]
        return {"bad_words": "x", "bad_words_ids": tuple(words)}
    if case == "4096 allowed ids":
        return {"allowed_token_ids": tuple(pick.choice(vocab, 4096, replace=False).tolist())}
    return {}


def engine(folder: Path, case: str, vocab: int, rows: int) -> EngineCore:
    """Return an engine at `rows` decoding sequences of some hundred tokens, or one of them longer."""
    config = EngineConfig(
        str(folder), max_model_len=33_000, max_num_seqs=rows, max_num_batched_tokens=4096, num_kv_blocks=16_000,
        block_size=16, dtype="float32", device="cpu", hf_overrides='{"max_position_embeddings": 40000}',
    )  # fmt: skip
    runner = ModelRunner(config, SoloGroup("cpu"))
    core = EngineCore(runner.config, SoloExecutor(runner), (2,), vocab, runner.config.num_kv_blocks or 0)
    pick = np.random.default_rng(0)
    for row in range(rows):
        long = case.endswith("32k") and row == 7
        prompt = tuple(pick.integers(10, vocab, LONG if long else pick.integers(200, 800)).tolist())
        params = SamplingParams(
            temperature=0.8, max_tokens=600, ignore_eos=True, **params_of(case, pick, vocab)
        )  # fmt: skip
        core.add(Request(f"r{row}", prompt, params, seed=row))
    while core.stats().outstanding_tokens:
        core.step()
    for _ in range(3):
        core.step()
    return core


def figures(core: EngineCore, steps: int) -> tuple[float, float, float]:
    """Return milliseconds of a step, those that prepare it, and MB that Python took for one at most."""
    whole, prepared, inputs = [], [], core._launcher._inputs
    plain = inputs.prepare

    def timed(schedule: Any) -> Any:
        began = time.process_time()
        found = plain(schedule)
        prepared.append(time.process_time() - began)
        return found

    inputs.prepare = timed  # type: ignore[method-assign]
    gc.collect()
    for _ in range(steps):
        began = time.process_time()
        core.step()
        whole.append(time.process_time() - began)
    tracemalloc.start()
    core.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return 1e3 * float(np.median(whole)), 1e3 * float(np.median(prepared)), peak / 1e6


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder), sizes=SHAPE | {"vocab_size": options.vocab})
        for case in CASES:
            core = engine(Path(folder), case, options.vocab, options.rows)
            step, prepare, peak = figures(core, options.steps)
            print(f"| {options.vocab} | {case} | {step:.1f} | {prepare:.2f} | {peak:.1f} |", flush=True)
            core.close()


if __name__ == "__main__":
    main()
