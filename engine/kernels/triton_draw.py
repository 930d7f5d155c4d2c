"""The Triton kernels that draw tokens; `engine.kernels.triton_sampler` says in which order and why.

All arrays have a row per token that is drawn. A run is RUN neighbouring ids; its peak is the largest of its logits as
they came, its mass the sum of exp(logit / temperature - peak / temperature) over those of its ids that may be drawn.
A NaN counts as an infinite logit. Loops are bounded whatever the logits hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.handles import kept

RUN = tl.constexpr(64)
RUN_INDEX = tl.constexpr(1 << 32)  # where the runs' indices begin in the noise of a row
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
NEVER = tl.constexpr(float("-inf"))


# Shares of a vocabulary need no kernels of their own: where their peaks and masses begin follows from the rows.
@kept
@triton.jit(do_not_specialize=["num_runs"], do_not_specialize_on_alignment=["peaks", "masses"])
def scan(
    logits: tl.tensor,  # [num_rows, vocab], rows strided
    temperatures: tl.tensor,
    peaks: tl.tensor,  # [num_rows, num_runs], written
    masses: tl.tensor,  # [num_rows, num_runs], written where temperature is not 0
    row_stride: tl.tensor,
    vocab: tl.tensor,
    num_runs: tl.tensor,
    RUNS: tl.constexpr,
) -> None:
    """The one pass over all logits: a program takes RUNS runs of a row."""
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    ids = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = sound(tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=NEVER))
    peak = tl.max(x, 1)
    tl.store(peaks + row * num_runs + run, peak, mask=run < num_runs)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        centre = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
        weights = tl.exp(tl.div_rn(x, temperature) - tl.div_rn(centre, temperature)[:, None])
        tl.store(masses + row * num_runs + run, tl.sum(weights, 1), mask=run < num_runs)


@kept
@triton.jit(do_not_specialize=["num_runs", "filtered"], do_not_specialize_on_alignment=["peaks", "masses", "leasts"])
def race(
    logits: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    leasts: tl.tensor,
    tokens: tl.tensor,  # [num_rows], written; -1 where the best logit is not finite, or the id not among `logits`
    row_stride: tl.tensor,
    vocab: tl.tensor,
    num_runs: tl.tensor,
    first_id: tl.tensor,  # of `logits`, which may be a share of the vocabulary that peaks and masses are of
    num_ids: tl.tensor,
    filtered: tl.tensor,  # 0 = nobody wrote `leasts`
    BLOCK: tl.constexpr,
    RACED: tl.constexpr,
) -> None:
    """Take the best id, or draw a run by its mass and an id within it, by Gumbel-max: a program per row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    run = tl.arange(0, BLOCK)
    real = run < num_runs
    peak = tl.load(peaks + row * num_runs + run, mask=real, other=NEVER)
    most = tl.max(peak, 0)
    token = -1
    if tl.abs(most) < float("inf"):
        logits += row * row_stride
        beyond = tl.minimum(first_id + num_ids, vocab)
        if temperature > 0:
            key = tl.load(keys + row).to(tl.uint64, bitcast=True)
            winner = _draw_run(peaks + row * num_runs, masses + row * num_runs, num_runs, temperature, key, RACED)
            ids = winner * RUN + tl.arange(0, RUN)
            here = (ids >= first_id) & (ids < beyond)
            x = tl.div_rn(sound(tl.load(logits + (ids - first_id), mask=here, other=NEVER)), temperature)
            least = tl.load(leasts + row, mask=filtered > 0, other=NEVER)
            score = x.to(tl.float64) + _gumbel(key, ids.to(tl.uint64))
            token = _first(tl.where((x >= least) & here, score, NEVER), ids)
        else:
            ids = _first(peak, run) * RUN + tl.arange(0, RUN)
            here = (ids >= first_id) & (ids < beyond)
            token = _first(sound(tl.load(logits + (ids - first_id), mask=here, other=NEVER)), ids)
        if tl.max(here.to(tl.int32), 0) == 0:
            token = -1
    tl.store(tokens + row, token)


@kept
@triton.jit
def forbid(
    logits: tl.tensor,  # [num_rows, vocab], rows strided, changed in place
    rows: tl.tensor,  # [num_masked]
    bits: tl.tensor,  # [num_masked, num_words]: allowed ids, the lowest first
    row_stride: tl.tensor,
    vocab: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write -inf where a bit is not set: a program per masked row and BLOCK ids."""
    masked = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bits + masked * num_words + ids // 32, mask=ids < vocab, other=-1)
    target = logits + tl.load(rows + masked).to(tl.int64) * row_stride + ids
    tl.store(target, tl.full((BLOCK,), NEVER, tl.float32), mask=(ids < vocab) & (((words >> (ids % 32)) & 1) == 0))


@triton.jit
def _draw_run(
    peaks: tl.tensor,
    masses: tl.tensor,
    num_runs: tl.tensor,
    temperature: tl.tensor,
    key: tl.tensor,
    RACED: tl.constexpr,
) -> tl.tensor:
    """Return the run that wins by its mass and its noise; RACED runs at a time, for logarithms in fp64 are long."""
    best = tl.full((RACED,), NEVER, tl.float64)
    winner = tl.full((RACED,), 0, tl.int32)
    for first in range(0, num_runs, RACED):
        run = first + tl.arange(0, RACED)
        peak = tl.load(peaks + run, mask=run < num_runs, other=0.0)
        mass = tl.load(masses + run, mask=run < num_runs, other=0.0)
        score = tl.log(tl.where(mass > 0, mass, 1.0).to(tl.float64)) + tl.div_rn(peak, temperature).to(tl.float64)
        score = tl.where(mass > 0, score + _gumbel(key, run.to(tl.uint64) + RUN_INDEX), NEVER)
        winner = tl.where(score > best, run, winner)
        best = tl.maximum(best, score)
    return _first(best, winner)


@triton.jit
def sound(x: tl.tensor) -> tl.tensor:
    """Return logits in fp32, a NaN as an infinite one."""
    x = x.to(tl.float32)
    return tl.where(x <= float("inf"), x, float("inf"))


@triton.jit
def _first(score: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Return the lowest index of those with the best score."""
    return tl.min(tl.where(score == tl.max(score, 0), index, 0x7FFFFFFF), 0)


@triton.jit
def _gumbel(key: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Return the noise of `engine.sampling.noise.gumbel`, in fp64."""
    x = key + (index + 1) * GOLDEN
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    x = x ^ (x >> 31)
    uniform = ((x >> 11).to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)
    return -tl.log(-tl.log(uniform))
