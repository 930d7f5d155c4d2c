"""The same model by transformers: how far apart logits are, and whether greedy decoding takes the same tokens.

The oracle is transformers in fp32. Where its two best tokens are nearer than bf16 rounding moves them (measured by
transformers' own bf16 against it), either is right; everywhere else our tokens must be the oracle's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.loads import random_prompts
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.session import free, session
from tests.bench.gpu.shapes import Shape
from tests.bench.gpu.theirs import their_model
from tests.parity.stepping import Sequence, Stepper, sampling

DTYPES = {"qwen3-0.6b": ("bfloat16", "float32"), "llama-3.2-1b": ("bfloat16",), "qwen3-8b": ("bfloat16",)}
FIGURES = ("mean_abs", "max_abs", "relative", "over_theirs", "greedy", "clear", "agree_clear")
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one engine says of the same tokens. logits: [prompts, tokens, vocab] fp32, from transformers."""

    prompts: Tensor  # [prompts, tokens]
    ours: Tensor  # [prompts, tokens, vocab]  fp32
    drawn: Tensor  # [prompts, new]  our greedy tokens
    theirs: Tensor  # [prompts, tokens + new, vocab]  in our dtype's precision
    oracle: Tensor  # [prompts, tokens + new, vocab]  in fp32


def part(scale: Scale, name: str) -> Part:
    """Return the comparison of one shape."""
    shape, stem = scale.shape(name), f"parity-{name}"
    figures = tuple(figure for dtype in DTYPES[name] for figure in _figures(f"{stem}/{dtype}", dtype))
    return Part(stem, f"Parity with transformers, {name}", figures, lambda bench: _run(bench, shape, stem))


def _names(stem: str) -> tuple[str, ...]:
    return tuple(f"{stem}/{what}" for what in FIGURES)


def _figures(stem: str, dtype: str) -> tuple[Figure, ...]:
    names, of = _names(stem), f"{dtype}: "
    return (
        Figure(names[0], f"{of}distance of logits, mean", "abs", higher=False),
        Figure(names[1], f"{of}distance of logits, largest", "abs", higher=False),
        Figure(names[2], f"{of}distance of logits over their size (2-norms)", "x", higher=False),
        Figure(names[3], f"{of}our distance to fp32 over that of transformers' {dtype}", "x", aim="1", higher=False),
        Figure(names[4], f"{of}greedy tokens that are the oracle's", "%"),
        Figure(names[5], f"{of}positions where its two best are further apart than rounding moves them", "%"),
        Figure(names[6], f"{of}greedy tokens that are the oracle's, there", "%", aim="100"),
    )


def _run(bench: Bench, shape: Shape, stem: str) -> None:
    for dtype in DTYPES[shape.name]:
        bench.measure(lambda dtype=dtype: _distances(_compute(bench, shape, dtype)), *_names(f"{stem}/{dtype}"))


def _distances(found: Outputs) -> tuple[float, ...]:
    """Return the figures of `_figures`, in order."""
    count = found.prompts.shape[1]
    theirs, oracle = found.theirs[:, :count], found.oracle[:, :count]
    apart = found.ours - theirs
    own, other = (found.ours - oracle).norm(), (theirs - oracle).norm()
    # Where both compute in fp32 the oracle is their own output: no rounding to compare with.
    over = float(own / other) if other > 0 else 1.0
    same, clear = agreement(found)
    share = 100.0 * float(same[clear].float().mean()) if clear.any() else 100.0
    return (
        float(apart.abs().mean()),
        float(apart.abs().max()),
        float(apart.norm() / theirs.norm()),
        over,
        100.0 * float(same.float().mean()),
        100.0 * float(clear.float().mean()),
        share,
    )


def agreement(found: Outputs) -> tuple[Tensor, Tensor]:
    """Return whether each drawn token is the oracle's, and whether the oracle is clear there: [prompts, new] each."""
    first, new = found.prompts.shape[1] - 1, found.drawn.shape[1]
    oracle, theirs = (logits[:, first : first + new] for logits in (found.oracle, found.theirs))
    best = oracle.topk(2, dim=-1)
    noise = (theirs.gather(-1, best.indices) - best.values).abs().max()
    clear = best.values[..., 0] - best.values[..., 1] > 2 * noise
    return best.indices[..., 0] == found.drawn, clear


def _compute(bench: Bench, shape: Shape, dtype: str) -> Outputs:
    count, length, new = bench.scale.parity_prompts
    folder = bench.folder(shape)
    prompts = random_prompts(count, length, shape.vocab, seed=1)
    settings = {"max_model_len": length + new + BLOCK, "num_kv_blocks": 2 + count * (2 + (length + new) // BLOCK)}
    ours = _our_logits(bench, folder, dtype, prompts, settings)
    with session(folder, bench.device, dtype=dtype, **settings) as opened:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        answers = opened.llm.generate(prompts, params, use_tqdm=False)
    given, drawn = (
        torch.tensor(rows, device=bench.device)
        for rows in (prompts, [answer.outputs[0].token_ids for answer in answers])
    )
    whole = torch.cat([given, drawn], dim=1)
    theirs = _their_logits(bench, folder, dtype, whole)
    oracle = theirs if dtype == "float32" else _their_logits(bench, folder, "float32", whole)
    return Outputs(given, ours, drawn, theirs, oracle)


def _our_logits(bench: Bench, folder: Path, dtype: str, prompts: list[list[int]], settings: dict[str, int]) -> Tensor:
    """Return the logits of every prompt token, [prompts, tokens, vocab] fp32, from one step."""
    tokens = sum(map(len, prompts))
    config = EngineConfig(
        str(folder), device=str(bench.device), dtype=dtype, max_num_batched_tokens=max(tokens, 256), **settings
    )
    stepper = Stepper(ModelRunner(config, SoloGroup(bench.device)))
    pieces: list[Tensor] = []
    stepper.runner.model.head.register_forward_hook(lambda *call: pieces.append(call[-1].float()))
    inputs = stepper.inputs([Sequence(list(prompt)) for prompt in prompts], [len(prompt) for prompt in prompts])
    last = (np.cumsum([len(prompt) for prompt in prompts]) - 1).astype(np.int32)
    draws = replace(sampling(len(prompts)), rows=last)
    stepper.runner.execute(replace(inputs, logits_indices=np.arange(tokens, dtype=np.int32)), draws)
    found = torch.cat(pieces).reshape(len(prompts), len(prompts[0]), -1)
    del stepper
    free(bench.device)
    return found


@torch.inference_mode()
def _their_logits(bench: Bench, folder: Path, dtype: str, tokens: Tensor) -> Tensor:
    """Return transformers' logits of every token, [prompts, tokens, vocab] fp32."""
    model = their_model(folder, getattr(torch, dtype), bench.device)
    found = model(tokens, use_cache=False).logits.float()
    del model
    free(bench.device)
    return found
