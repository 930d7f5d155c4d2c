"""What quantised weights cost in accuracy and give in speed: `python -m tests.bench.quantised`.

Accuracy, on the demo model: 32 chats of it, which the plain model in float32 answers greedily. The other kinds of
weights then get the same tokens (teacher forcing), and their logits after each token of the answers are compared;
and they answer by themselves, where one other token makes all later ones differ. fp8 is emulated: its arithmetic is
that of the GPU (exact products of e4m3, summed in fp32), which is all that is said of it here.

Speed, on this CPU, which takes minutes: decode of one sequence and of eight, plain, int8 and int4 in turns in one
process, the best of several rounds; on a random Qwen3-shaped model of 100M parameters, or 0.6B (`--shape 0.6b`), with
weights far larger than the cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deploy.demo import demo_model_path
from engine.config import EngineConfig
from engine.llm import LLM
from engine.loader.checkpoint import open_model
from engine.resolve import resolve_for
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from engine.worker.footprint import footprint_of
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.bench.machine import provenance
from tests.bench.random_model import SIZES, save_random_model
from tests.parity.stepping import Sequence, Stepper, sampling

ANSWER = 64  # tokens
Flags = dict[str, Any]
NAMES = (
    *("os.path.join", "os.path.exists", "os.listdir", "os.makedirs", "shutil.copytree", "shutil.rmtree", "glob.glob"),
    *("json.dumps", "json.loads", "csv.reader", "pickle.load", "random.choice", "random.shuffle", "math.gcd"),
    *("statistics.median", "datetime.date.today", "time.sleep", "time.monotonic", "re.match", "re.sub", "re.split"),
    *("itertools.chain", "functools.partial", "collections.Counter", "heapq.heappush", "bisect.insort", "zlib.crc32"),
    *("hashlib.sha256", "socket.create_connection", "threading.Thread", "subprocess.run", "logging.getLogger"),
)
GROUPS = (128, 64, 32)
HEAD: Flags = {"quantize_lm_head": True}
# Data type of activations, and what the flags say of weights.
KINDS: tuple[tuple[str, Flags], ...] = (
    ("float32", {}),
    ("bfloat16", {}),
    ("float32", {"quantization": "int8"}),
    ("bfloat16", {"quantization": "int8"}),
    ("bfloat16", {"quantization": "fp8"}),
    *(("float32", {"quantization": "int4", "quantization_group_size": group}) for group in GROUPS),
    ("bfloat16", {"quantization": "int4"}),
    ("bfloat16", {"quantization": "int4"} | HEAD),
)
WEIGHTS: dict[str, Flags] = {
    "plain": {},
    "int8": {"quantization": "int8"},
    "int8, head too": {"quantization": "int8"} | HEAD,
    "int4": {"quantization": "int4"},
    "int4, head in int8": {"quantization": "int4"} | HEAD,
}
BLOCKS = 256  # of KV cache
BATCHES = (1, 8)
DECODED = 48


@dataclass(frozen=True, slots=True)
class Distance:
    """Between logits and those of the reference, over all tokens of all answers.

    mean, most: of absolute differences. spread: the standard deviation of the reference's logits, as a yardstick.
    kl: mean divergence in nats. same: share of tokens whose best is the reference's. together: share of tokens of
    answers of its own before the first other one. weight_bytes: weights and tables.
    """

    mean: float
    most: float
    spread: float
    kl: float
    same: float
    together: float
    weight_bytes: int


def chats() -> list[list[int]]:
    """Return the prompts as token ids."""
    tokenizer = Tokenizer(str(demo_model_path()))
    asked = [[{"role": "user", "content": f"What does {name} do?"}] for name in NAMES]
    return [tokenizer.encode(tokenizer.render_chat(each), add_special_tokens=False) for each in asked]


def accuracy() -> Iterator[tuple[str, Distance]]:
    """Yield each kind of weights with its distance from the first."""
    prompts = chats()
    texts: list[Sequence] = []
    reference: list[Tensor] = []
    for dtype, flags in KINDS:
        name = _name(dtype, flags)
        _tell(f"{name}: {len(prompts)} answers")
        stepper = _stepper(dtype, flags)
        own = stepper.generate(prompts, ANSWER)
        stepper.release(own)
        texts = texts or own
        found = [_logits(stepper, text.tokens)[len(p) - 1 : -1] for text, p in zip(texts, prompts, strict=True)]
        reference = reference or found
        pairs = [_common(mine.tokens, text.tokens, len(p)) for mine, text, p in zip(own, texts, prompts, strict=True)]
        together = sum(pairs) / (ANSWER * len(prompts))
        yield name, _distance(torch.cat(found), torch.cat(reference), together, _bytes(dtype, flags))


def _name(dtype: str, flags: Flags) -> str:
    form = EngineConfig("", **flags).weight_form
    return dtype if form is None else f"{form}, activations in {dtype}"


def speed(threads: int, rounds: int, shape: str = "100m") -> dict[str, float]:
    """Return decoded tokens a second by dtype, weights and sequences."""
    torch.set_num_threads(threads)
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        _tell(f"speed: making a model of {shape.upper()} parameters")
        save_random_model(Path(folder), sizes=SIZES[shape])
        for dtype in ("float32", "bfloat16"):
            with ExitStack() as stack:
                made = {
                    name: stack.enter_context(LLM(folder, dtype=dtype, device="cpu", num_kv_blocks=BLOCKS, **flags))
                    for name, flags in WEIGHTS.items()
                }
                for number in range(rounds):
                    _tell(f"speed in {dtype}: round {number + 1} of {rounds}")
                    for batch in BATCHES:
                        for name, llm in made.items():
                            key = f"{dtype} {name} {batch}"
                            best[key] = max(best.get(key, 0.0), _decode(llm, batch))
    return best


def _stepper(dtype: str, flags: Flags) -> Stepper:
    config = EngineConfig(str(demo_model_path()), dtype=dtype, device="cpu", num_kv_blocks=512, **flags)
    with mock.patch("engine.resolve.check_device"):  # which refuses fp8 on a CPU
        return Stepper(ModelRunner(config, SoloGroup()))


def _logits(stepper: Stepper, tokens: list[int]) -> Tensor:
    """Return the logits after each token, [tokens, vocabulary] in fp32."""
    sequence = Sequence(list(tokens))
    inputs = stepper.inputs([sequence], [len(tokens)])
    inputs.logits_indices = np.arange(len(tokens), dtype=np.int32)
    stepper.runner.execute(inputs, sampling(len(tokens)))
    stepper.release([sequence])
    return stepper._logits.float()


def _distance(found: Tensor, reference: Tensor, together: float, weight_bytes: int) -> Distance:
    apart = (found - reference).abs()
    log_p, log_q = F.log_softmax(reference, -1), F.log_softmax(found, -1)
    return Distance(
        mean=float(apart.mean()),
        most=float(apart.max()),
        spread=float(reference.std()),
        kl=float(F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")),
        same=float((found.argmax(-1) == reference.argmax(-1)).float().mean()),
        together=together,
        weight_bytes=weight_bytes,
    )


def _common(mine: list[int], theirs: list[int], start: int) -> int:
    """Return how many tokens from `start` on are the same before the first other one."""
    differing = (i for i in range(start, len(theirs)) if mine[i] != theirs[i])
    return next(differing, len(theirs)) - start


def _bytes(dtype: str, flags: Flags) -> int:
    plain_head = {name: value for name, value in flags.items() if name not in HEAD}
    config = EngineConfig(str(demo_model_path()), dtype=dtype, **plain_head)
    model = open_model(config.model).config
    found = footprint_of(resolve_for(config, model, "cuda"), model)
    # The table of embeddings, which the demo model's head is tied to, stays beside a head in int8.
    return found.weight_bytes + (found.head_products if plain_head != flags else 0)


def _decode(llm: LLM, batch: int) -> float:
    """Return tokens a second of decode steps alone: with more output less with one token."""
    prompts = [list(range(10 + i, 42 + i)) for i in range(batch)]

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - began

    first = seconds(1)
    return batch * DECODED / (seconds(1 + DECODED) - first)


def _tell(doing: str) -> None:
    """Say what takes long, on stderr, where it is no part of the tables."""
    print(doing, file=sys.stderr, flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shape", choices=SIZES, default="100m")
    parser.add_argument("--speed-only", action="store_true")
    options = parser.parse_args()
    machine = provenance()["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']}, torch {torch.__version__}\n")
    if not options.speed_only:
        _print_accuracy()
    columns = [column for name in WEIGHTS for column in ([name] if name == "plain" else [name, "x"])]
    print(f"\n| decode tokens/s, {options.threads} threads, {options.shape} | sequences | {' | '.join(columns)} |")
    print(f"| --- | {' | '.join(['---:'] * (1 + len(columns)))} |")
    best = speed(options.threads, options.rounds, options.shape)
    for dtype in ("float32", "bfloat16"):
        for batch in BATCHES:
            plain, *others = (best[f"{dtype} {name} {batch}"] for name in WEIGHTS)
            rates = [f"{plain:.1f}", *(f"{rate:.1f} | {rate / plain:.2f}" for rate in others)]
            print(f"| {dtype} | {batch} | {' | '.join(rates)} |")


def _print_accuracy() -> None:
    print("| weights | MB | mean apart | most apart | spread | KL, nats | same best | together |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, found in accuracy():
        print(
            f"| {name} | {found.weight_bytes / 1e6:.1f} | {found.mean:.4f} | {found.most:.3f} | {found.spread:.2f} | "
            f"{found.kl:.2e} | {found.same:.2%} | {found.together:.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
