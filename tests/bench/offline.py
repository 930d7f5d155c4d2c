"""Offline tokens per second of `engine.llm.LLM`, side by side with transformers in the same run.

The load: 64 sequences at once, prompts of 32 to 256 and outputs of 32 to 128 tokens, greedy, end-of-sequence
ignored, 2 threads; on the demo model and on a random Qwen3-shaped checkpoint of 100M parameters. Only the tokens that
were asked for count, and all are decoded to text. transformers is run in three ways:

- `static`: `generate` on one left-padded batch, which runs to the longest output, as it would for a user;
- `continuous`: its continuous batching, each sequence to its own length;
- `alone`: one sequence, milliseconds per token.

`even` is a load of 64 prompts of 128 tokens with 80 more each: nothing is padded and nothing runs on for others, so
that `generate` is told as an engine, without what its batching costs. Every measurement has a fresh process; the
engines take turns, `--runs` times, and the median is told with the least and the most.

    python -m tests.bench.offline [--runs 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import torch

from deploy.demo import demo_model_path
from tests.bench.random_model import Load, make_load, save_random_model

THREADS = 2
SINGLE_TOKENS = 64
EVEN = (64, 128, 80)  # sequences, tokens of a prompt, tokens of an answer
TIMEOUT = 1800.0
RUNS = 3
PAGES = 256  # of continuous batching, 256 tokens each: a CPU's memory would be filled without a bound
BATCHED = 512  # tokens of one of its steps at most
# A ratio of `measure`: ours over theirs, or the other way round where less is better.
RATIOS = {
    "static": ("tokens_per_s", "transformers", "tokens_per_s"),
    "even": ("even_tokens_per_s", "transformers", "even_tokens_per_s"),
    "continuous": ("tokens_per_s", "continuous", "tokens_per_s"),
    "alone": ("tpot_ms", "transformers", "tpot_ms"),
}

Generate = Callable[[list[list[int]], list[int]], float]
Figures = dict[str, float]


def measure(runs: int = RUNS) -> Figures:
    """Return the figures by name: tokens/s, ratios, milliseconds per token at batch 1, seconds to the first token.

    Each is a median; `..._least` and `..._most` tell the spread where there was more than one run.
    """
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder))
        for _ in range(runs):
            demo = _in_process("squadron", demo_model_path(), "auto")
            _add(samples, {f"offline_demo_{name}": demo[name] for name in ("tokens_per_s", "tpot_ms")})
            for dtype in ("float32", *(["bfloat16"] if has_bf16_units() else [])):
                found = {engine: _in_process(engine, Path(folder), dtype) for engine in ENGINES}
                for engine, figures in found.items():
                    stem = "offline" if engine == "squadron" else engine
                    _add(samples, {f"{stem}_100m_{dtype}_{name}": value for name, value in figures.items()})
                _add(samples, ratios(found, dtype))
    return summary(samples)


def ratios(found: Mapping[str, Figures], dtype: str) -> Figures:
    """Return how many times faster we are, in each way to compare."""
    result = {}
    for name, (ours, engine, theirs) in RATIOS.items():
        value = found["squadron"][ours] / found[engine][theirs]
        suffix = "" if dtype == "float32" else f"_{dtype}"
        result[f"offline_vs_transformers_{name}{suffix}"] = 1 / value if ours.endswith("_ms") else value
    return result


def summary(samples: Mapping[str, Sequence[float]]) -> Figures:
    """Return the median of each figure under its name, and its least and its most beside it."""
    found: Figures = {}
    for name, values in samples.items():
        found[name] = statistics.median(values)
        if len(values) > 1:
            found |= {f"{name}_least": min(values), f"{name}_most": max(values)}
    return found


def _add(samples: dict[str, list[float]], figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        samples.setdefault(name, []).append(value)


def has_bf16_units() -> bool:
    """Whether bf16 products are fast on this CPU; without the units they are slower than fp32."""
    can = torch.cpu.get_capabilities()
    return any(can.get(unit) for unit in ("avx512_bf16", "amx_bf16", "bf16"))


def even_load(vocab: int) -> Load:
    """Return prompts of one length that want one number of tokens."""
    sequences, length, tokens = EVEN
    prompts = [[10 + (7919 * row + place) % (vocab - 10) for place in range(length)] for row in range(sequences)]
    return Load(prompts, [tokens] * sequences)


def run_load(generate: Generate, vocab: int) -> Figures:
    """Return tokens/s of both loads and milliseconds per token of one sequence alone, after a warm-up of each."""
    load, even = make_load(vocab), even_load(vocab)
    generate(load.prompts[:8], [4] * 8)
    seconds = generate(load.prompts, load.outputs)
    evenly = generate(even.prompts, even.outputs)
    first = load.prompts[:1]
    prefill = generate(first, [1])
    whole = generate(first, [1 + SINGLE_TOKENS])
    return {
        "tokens_per_s": sum(load.outputs) / seconds,
        "even_tokens_per_s": sum(even.outputs) / evenly,
        "tpot_ms": (whole - prefill) / SINGLE_TOKENS * 1000,
    }


def squadron(folder: Path, dtype: str) -> Figures:
    """Measure the engine of this repository, in this process."""
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    # Without prefix hits: the warm-up has seen some of the prompts.
    with LLM(folder, dtype=dtype, device="cpu", enable_prefix_caching=False) as llm:

        def generate(prompts: list[list[int]], outputs: list[int]) -> float:
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]
            began = time.perf_counter()
            results = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            assert [len(result.outputs[0].token_ids) for result in results] == outputs
            return seconds

        generate([[5, 6, 7]], [1])
        start = time.time() - psutil.Process().create_time()
        figures = run_load(generate, llm.info.vocab_size)
    return figures | {"start_to_first_token_s": start}


def transformers(folder: Path, dtype: str) -> Figures:
    """Measure transformers' `generate`, in this process."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], outputs: list[int]) -> float:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        began = time.perf_counter()
        with torch.inference_mode():
            rows = model.generate(
                ids, attention_mask=mask, max_new_tokens=max(outputs), do_sample=False, pad_token_id=0
            )
        tokenizer.batch_decode([row[width : width + n] for row, n in zip(rows, outputs, strict=True)])
        seconds = time.perf_counter() - began
        assert rows.shape[1] == width + max(outputs)
        return seconds

    generate([[5, 6, 7]], [1])
    start = time.time() - psutil.Process().create_time()
    return run_load(generate, model.config.vocab_size) | {"start_to_first_token_s": start}


def continuous(folder: Path, dtype: str) -> Figures:
    """Measure transformers' continuous batching, in this process."""
    from transformers import AutoTokenizer

    from tests.bench.gpu.theirs import answered, continuous_batching, their_model

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = their_model(folder, getattr(torch, dtype), torch.device("cpu"))
    load = make_load(model.config.vocab_size)
    settings = {"num_blocks": PAGES, "max_batch_tokens": BATCHED}
    with continuous_batching(model, load, {"do_sample": False}, **settings) as manager:
        answered(manager, Load(load.prompts[:8], [4] * 8), "warm", TIMEOUT)
        began = time.perf_counter()
        found = answered(manager, load, "load", TIMEOUT)
        tokenizer.batch_decode(found)
        seconds = time.perf_counter() - began
    if sorted(map(len, found)) != sorted(load.outputs):
        raise RuntimeError("some sequence has not as many tokens as were asked for")
    return {"tokens_per_s": sum(load.outputs) / seconds}


ENGINES: dict[str, Callable[[Path, str], Figures]] = {
    "squadron": squadron,
    "transformers": transformers,
    "continuous": continuous,
}


def _in_process(engine: str, folder: Path, dtype: str) -> Figures:
    command = [sys.executable, "-m", "tests.bench.offline", "--engine", engine, "--model", folder, "--dtype", dtype]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, env=environment, check=True)
    figures: Figures = json.loads(result.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print the figures: of one engine as JSON for the process that asked, else of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of each engine, in turns (default: {RUNS})")
    parser.add_argument("--engine", choices=ENGINES, help="measure this one alone, in this process")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    if options.engine is None:
        for name, value in measure(options.runs).items():
            print(f"{name:60} {value:10.2f}")
        return
    torch.set_num_threads(THREADS)
    print(json.dumps(ENGINES[options.engine](options.model, options.dtype)))


if __name__ == "__main__":
    main()
