"""nano-vLLM's bench: 256 sequences at once, ours and transformers' own continuous batching in the same run."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from engine.sampling_params import SamplingParams
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import Limits, load_limit
from tests.bench.gpu.loads import Load
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.session import free, session
from tests.bench.gpu.shapes import Shape
from tests.bench.gpu.theirs import answered, continuous_batching, their_model
from tests.bench.gpu.timing import synchronise

RUNS = 3
PATIENCE = 150.0  # seconds for transformers
TEMPERATURE = 0.6
AIMS = {"qwen3-0.6b": "27,000", "qwen3-8b": "10,400"}


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of the load by transformers. tokens: of the requests that ended."""

    ended: int
    total: int
    tokens: int
    seconds: float

    @property
    def cut(self) -> str:
        """What is to be said when it was stopped."""
        if self.ended == self.total:
            return ""
        many = f"the {self.ended} of {self.total} requests that had ended"
        return f", stopped after {self.seconds:.0f} s: the tokens of {many}"


def parts(scale: Scale, name: str) -> tuple[Part, Part]:
    """Return the bench of one shape: ours, and transformers'."""
    shape = scale.shape(name)
    ours, theirs = f"load-{name}", f"transformers-{name}"

    def limit(limits: Limits) -> float:
        return load_limit(shape, scale.load, limits)

    own = (
        Figure(f"{ours}/first", "output tokens/s, first run (graphs captured on the way)", "tokens/s", limit),
        Figure(f"{ours}/tokens_per_s", "output tokens/s", "tokens/s", limit, AIMS[name]),
    )
    other = Figure(f"{theirs}/tokens_per_s", "output tokens/s of transformers' `generate_batch`", "tokens/s", limit)
    return (
        Part(ours, f"nano-vLLM's bench, {name}", own, lambda bench: _ours(bench, shape, ours)),
        Part(theirs, f"The same by transformers, {name}", (other,), lambda bench: _theirs(bench, shape, other.name)),
    )


def _ours(bench: Bench, shape: Shape, part: str) -> None:
    load = bench.scale.load
    settings = {"max_model_len": bench.scale.max_model_len, "enable_prefix_caching": False}
    params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count) for count in load.outputs]
    with session(bench.folder(shape), bench.device, **settings) as opened:

        def once() -> float:
            began = time.perf_counter()
            answers = opened.llm.generate(load.prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            opened.refuse_lost_graphs()
            if [len(answer.outputs[0].token_ids) for answer in answers] != list(load.outputs):
                raise RuntimeError("some sequence has not as many tokens as were asked for")
            return sum(load.outputs) / seconds

        opened.llm.generate([[5, 6, 7]], SamplingParams(max_tokens=16), use_tqdm=False)
        bench.measure(once, f"{part}/first")
        bench.measure(lambda: [once() for _ in range(RUNS)], f"{part}/tokens_per_s")


def _theirs(bench: Bench, shape: Shape, name: str) -> None:
    bench.measure(lambda: _continuous_batching(bench, shape), name)


def _continuous_batching(bench: Bench, shape: Shape) -> float:
    """Return the tokens/s of transformers, each sequence to its own length.

    Of its second run of the load, as ours is told after a first one; of the first where that took most of the time.
    """
    model = their_model(bench.folder(shape), torch.bfloat16, bench.device)
    try:
        with _manager(model, bench) as manager:
            answered(manager, Load([[5, 6, 7]], [8]), "warm", PATIENCE)
            run = _timed(manager, bench, "first")
            second = run.ended == run.total and run.seconds < PATIENCE / 2
            run = _timed(manager, bench, "second") if second else run
            bench.note(f"attention: sdpa; {'second' if second else 'first'} run{run.cut}")
            return run.tokens / run.seconds
    finally:
        del model
        free(bench.device)


def _timed(manager: Any, bench: Bench, prefix: str) -> Run:
    synchronise(bench.device)
    began = time.perf_counter()
    answers = answered(manager, bench.scale.load, prefix, PATIENCE)
    seconds = time.perf_counter() - began
    return Run(len(answers), len(bench.scale.load.prompts), sum(map(len, answers)), seconds)


def _manager(model: Any, bench: Bench) -> Any:
    load = bench.scale.load
    # Blocks of a CPU, where it would take most of the memory.
    more = {} if bench.on_gpu else {"num_blocks": 16 * len(load.prompts), "max_batch_tokens": 256}
    return continuous_batching(model, load, {"do_sample": True, "temperature": TEMPERATURE}, **more)
