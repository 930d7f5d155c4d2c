"""What drawing tokens costs on a CPU beside reading the logits once: `python -m tests.bench.sampling`.

64 rows of 151,936 random logits, of two kinds: "steep" as a model's are, where few ids have most of the mass, and
"flat", where top-p leaves about half of the vocabulary or more. Each figure is the least of several rounds, in which
all ways take turns. The ratio is the compiled sampler to a single pass that finds the largest of all 32-bit words:
where logits have 16 bits it reads half as much.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.kernels.native_sampler import NativeDraws, draw_library
from engine.report import SamplingInputs
from tests.bench.machine import provenance
from tests.parity.stepping import sample, sampling

VOCAB = 151_936  # Qwen3
CASES: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 0.7": {"temperature": 0.7},
    "min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "top-k 50": {"temperature": 0.7, "top_k": 50},
    "top-k 20, top-p 0.95": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "one row of all with penalties": {"temperature": 0.7, "presence_penalty": 1.0},
}


def logits_of(kind: str, rows: int) -> Tensor:
    """Return random logits, [rows, VOCAB] fp32."""
    noise = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))
    if kind == "steep":
        noise *= 2.5
        noise[:, ::997] += 8
        noise[:, 5000] += 14
    return noise


def inputs_of(case: str, rows: int) -> SamplingInputs:
    """Return the parameters of a case; each row has a seed of its own."""
    values = {name: np.full(rows, value) for name, value in CASES[case].items()}
    if "presence_penalty" not in values:
        return sampling(rows, seeds=np.arange(rows), **values)
    values["presence_penalty"][1:] = 0
    ids = np.arange(100, dtype=np.int32)[None].repeat(rows, 0)
    return sampling(rows, seeds=np.arange(rows), prompt_ids=ids, output_ids=ids, **values)


def least(ways: dict[str, Callable[[], object]], rounds: dict[str, int]) -> dict[str, float]:
    """Return the least milliseconds of each way, which take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for number in range(max(rounds.values())):
        for name, way in ways.items():
            if number < rounds[name]:
                began = time.perf_counter()
                way()
                best[name] = min(best[name], 1e3 * (time.perf_counter() - began))
    return best


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="torch's path gets a tenth of them")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = draw_library()
    if library is None:
        raise SystemExit("no C compiler is installed: there is nothing to compare")
    draws = NativeDraws(library, options.threads)
    machine = provenance()["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']}, torch {torch.__version__}")
    print(f"{options.rows} rows x {VOCAB} ids, {options.threads} threads\n")
    print("| logits | case | torch, ms | compiled, ms | reading once, ms | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    rounds = {"torch": max(1, options.rounds // 10), "compiled": options.rounds, "reading": options.rounds}
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("steep", "flat"):
            logits = logits_of(kind, options.rows).to(dtype)
            words = logits.view(torch.int32)
            for case in CASES:
                inputs = inputs_of(case, options.rows)
                copy = logits.clone()  # which torch's path may overwrite; what it finds there costs the same

                def by_torch(copy: Tensor = copy, inputs: SamplingInputs = inputs) -> object:
                    return sample(copy, inputs)

                def compiled(logits: Tensor = logits, inputs: SamplingInputs = inputs) -> object:
                    return sample(logits, inputs, draws)

                def reading(words: Tensor = words) -> object:
                    return words.max()

                best = least({"torch": by_torch, "compiled": compiled, "reading": reading}, rounds)
                print(
                    f"| {kind}, {str(dtype).removeprefix('torch.')} | {case} | {best['torch']:.1f} "
                    f"| {best['compiled']:.2f} | {best['reading']:.2f} | {best['compiled'] / best['reading']:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
