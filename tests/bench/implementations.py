"""A native family beside the same model through transformers' layers and beside transformers' `generate`, in one run.

Two random checkpoints of about 100M parameters: `dense` (Qwen3) and `moe` (Qwen3-MoE, 32 experts of which each token
passes through 4). Output tokens per second of 1, 8 and 64 sequences with prompts of 32 to 256 and outputs of 32 to
128 tokens, greedy, fp32, 2 threads. `generate` runs one left-padded batch to its longest output; only the tokens that
were asked for count. In the `even` load all prompts have 128 tokens and all outputs 80: nothing is padded.

Every measurement has a fresh process; the three take turns, `--runs` times, and the median is printed with the least
and the most.

    python -m tests.bench.implementations [--runs 3] [--kinds dense moe]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import transformers

from tests.bench.machine import provenance
from tests.bench.offline import THREADS, TIMEOUT, Figures, Generate, even_load, summary
from tests.bench.random_model import VOCAB, make_load, save_word_tokenizer

SIZES = (1, 8, 64)
RUNS = 3
SHAPE = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: Mapping[str, Callable[[], transformers.PreTrainedConfig]] = {
    "dense": lambda: transformers.Qwen3Config(**SHAPE, hidden_size=768, intermediate_size=2048),
    "moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=128,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}
NATIVE, FALLBACK, GENERATE = "native", "transformers", "generate"
IMPLEMENTATIONS = (NATIVE, FALLBACK, GENERATE)


def measure(runs: int = RUNS, kinds: Sequence[str] = tuple(KINDS)) -> Figures:
    """Return tokens/s by kind, implementation and load, and their ratios: medians, as `summary` returns them."""
    samples: dict[str, list[float]] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            parameters = save_model(kind, Path(folder))
            samples[f"implementations_{kind}_parameters_m"] = [parameters / 1e6]
            for _ in range(runs):
                found = {one: _in_process(one, Path(folder)) for one in IMPLEMENTATIONS}
                for name, value in _named(kind, found).items():
                    samples.setdefault(name, []).append(value)
    return summary(samples)


def save_model(kind: str, folder: Path) -> int:
    """Write a random checkpoint of a kind, in fp32, with a tokenizer; returns how many parameters it has."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
    model.save_pretrained(folder)
    save_word_tokenizer(folder, VOCAB)
    return sum(parameter.numel() for parameter in model.parameters())


def _named(kind: str, found: Mapping[str, Figures]) -> Figures:
    figures: Figures = {}
    for load in found[NATIVE]:
        for one in IMPLEMENTATIONS:
            figures[f"implementations_{kind}_{one}_{load}"] = found[one][load]
        figures[f"implementations_{kind}_fallback_of_native_{load}"] = found[FALLBACK][load] / found[NATIVE][load]
        figures[f"implementations_{kind}_native_vs_generate_{load}"] = found[NATIVE][load] / found[GENERATE][load]
    return figures


def run_loads(generate: Generate) -> Figures:
    """Return tokens/s by load, after a warm-up."""
    warm = make_load(VOCAB, 8, seed=9)
    generate(warm.prompts, [4] * 8)
    loads = {f"{size}": make_load(VOCAB, size) for size in SIZES} | {"64_even": even_load(VOCAB)}
    return {name: sum(load.outputs) / generate(load.prompts, load.outputs) for name, load in loads.items()}


def engine(folder: Path, implementation: str) -> Figures:
    """Measure the engine of this repository, in this process."""
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    # Without prefix hits: a load begins with the prompts of the one before.
    with LLM(folder, dtype="float32", device="cpu", model_impl=implementation, enable_prefix_caching=False) as llm:

        def generate(prompts: list[list[int]], outputs: list[int]) -> float:
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]
            began = time.perf_counter()
            results = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            if [len(result.outputs[0].token_ids) for result in results] != outputs:
                raise RuntimeError("some sequence has not as many tokens as were asked for")
            return seconds

        return run_loads(generate)


def generate(folder: Path) -> Figures:
    """Measure transformers' `generate`, in this process."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def run(prompts: list[list[int]], outputs: list[int]) -> float:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        began = time.perf_counter()
        with torch.inference_mode():
            rows = model.generate(
                ids, attention_mask=mask, max_new_tokens=max(outputs), do_sample=False, pad_token_id=0
            )
        tokenizer.batch_decode([row[width : width + n] for row, n in zip(rows, outputs, strict=True)])
        return time.perf_counter() - began

    return run_loads(run)


def _in_process(implementation: str, folder: Path) -> Figures:
    command = [sys.executable, "-m", "tests.bench.implementations", "--only", implementation, "--model", folder]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, env=environment, check=True)
    figures: Figures = json.loads(result.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print the figures: of one implementation as JSON for the process that asked, else of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of each, in turns (default: {RUNS})")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", choices=IMPLEMENTATIONS, help="measure this one alone, in this process")
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    if options.only is None:
        print(json.dumps(provenance()))
        for name, value in measure(options.runs, options.kinds).items():
            print(f"{name:60} {value:10.2f}")
        return
    torch.set_num_threads(THREADS)
    print(json.dumps(generate(options.model) if options.only == GENERATE else engine(options.model, options.only)))


if __name__ == "__main__":
    main()
