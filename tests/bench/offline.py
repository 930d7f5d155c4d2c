"""Offline tokens per second of `engine.llm.LLM`, side by side with transformers' `generate` in the same run.

The load: 64 sequences at once, prompts of 32 to 256 and outputs of 32 to 128 tokens, greedy, end-of-sequence
ignored, 2 threads; on the demo model and on a random Qwen3-shaped checkpoint of 100M parameters. `generate` gets all
64 as one left-padded batch, which runs to the longest output, as it would for a user; only the tokens that were asked
for count, for both, and both decode their tokens to text. Every measurement has a fresh process.

`python -m tests.bench.offline` prints the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from deploy.demo import demo_model_path
from tests.bench.random_model import Load, make_load, save_random_model

THREADS = 2
SINGLE_TOKENS = 64
TIMEOUT = 900.0

Generate = Callable[[list[list[int]], list[int]], float]


def measure() -> dict[str, float]:
    """Return the figures by name: tokens/s, ratios, milliseconds per token at batch 1, seconds to the first token."""
    figures: dict[str, float] = {}
    demo = _in_process("squadron", demo_model_path(), "auto")
    figures["offline_demo_tokens_per_s"] = demo["tokens_per_s"]
    figures["offline_demo_tpot_ms"] = demo["tpot_ms"]
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder))
        for dtype in ("float32", *(["bfloat16"] if has_bf16_units() else [])):
            ours = _in_process("squadron", Path(folder), dtype)
            theirs = _in_process("transformers", Path(folder), dtype)
            figures |= {f"offline_100m_{dtype}_{name}": value for name, value in ours.items()}
            figures |= {f"transformers_100m_{dtype}_{name}": value for name, value in theirs.items()}
            ratio = "offline_vs_transformers_ratio" + ("" if dtype == "float32" else "_bfloat16")
            figures[ratio] = ours["tokens_per_s"] / theirs["tokens_per_s"]
    return figures


def has_bf16_units() -> bool:
    """Whether bf16 products are fast on this CPU; without the units they are slower than fp32."""
    can = torch.cpu.get_capabilities()
    return any(can.get(unit) for unit in ("avx512_bf16", "amx_bf16", "bf16"))


def run_load(generate: Generate, load: Load) -> dict[str, float]:
    """Return tokens/s of the load and milliseconds per token of one sequence alone, after a warm-up of each."""
    generate(load.prompts[:8], [4] * 8)
    seconds = generate(load.prompts, load.outputs)
    first = load.prompts[:1]
    prefill = generate(first, [1])
    whole = generate(first, [1 + SINGLE_TOKENS])
    return {
        "tokens_per_s": sum(load.outputs) / seconds,
        "tpot_ms": (whole - prefill) / SINGLE_TOKENS * 1000,
    }


def squadron(folder: Path, dtype: str) -> dict[str, float]:
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
        figures = run_load(generate, make_load(llm.info.vocab_size))
    return figures | {"start_to_first_token_s": start}


def transformers(folder: Path, dtype: str) -> dict[str, float]:
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
    return run_load(generate, make_load(model.config.vocab_size)) | {"start_to_first_token_s": start}


def _in_process(engine: str, folder: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.offline", "--engine", engine, "--model", folder, "--dtype", dtype]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, env=environment, check=True)
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print the figures: of one engine as JSON for the process that asked, else of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("squadron", "transformers"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    if options.engine is None:
        for name, value in measure().items():
            print(f"{name:55} {value:10.2f}")
        return
    torch.set_num_threads(THREADS)
    engines: dict[str, Any] = {"squadron": squadron, "transformers": transformers}
    print(json.dumps(engines[options.engine](options.model, options.dtype)))


if __name__ == "__main__":
    main()
