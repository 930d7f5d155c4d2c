"""The Triton kernels that draw tokens and find what min-p, top-k and top-p leave.

`engine.kernels.triton_sampler` says in which order and why. All arrays have a row per token that is drawn. A run is
RUN neighbouring ids; its peak is the largest of its logits as they came, its mass the sum of exp(logit / temperature
- peak / temperature) over those of its ids that may be drawn. A NaN counts as an infinite logit. Loops are bounded
whatever the logits hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton_launch import kept

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
def draw_by_gumbel(
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
    filtered: tl.tensor,  # 0 = `leasts` is not written
    BLOCK: tl.constexpr,
    RUNS_AT_ONCE: tl.constexpr,
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
            winner = _draw_run(
                peaks + row * num_runs, masses + row * num_runs, num_runs, temperature, key, RUNS_AT_ONCE
            )
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
    RUNS_AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """Return the run that wins by its mass and its noise. Few runs at a time, for logarithms in fp64 take long."""
    best = tl.full((RUNS_AT_ONCE,), NEVER, tl.float64)
    winner = tl.full((RUNS_AT_ONCE,), 0, tl.int32)
    for first in range(0, num_runs, RUNS_AT_ONCE):
        run = first + tl.arange(0, RUNS_AT_ONCE)
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
    """Return the noise of `engine.sampling.gumbel.gumbel`, in fp64."""
    x = key + (index + 1) * GOLDEN
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    x = x ^ (x >> 31)
    uniform = ((x >> 11).to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)
    return -tl.log(-tl.log(uniform))


SLACK = tl.constexpr(1.0001)  # that a bound made of peaks has to spare, so that rounding cannot make it too high


@kept
@triton.jit
def bound(
    temperatures: tl.tensor,
    log_min_ps: tl.tensor,
    top_ks: tl.tensor,  # 0 = off
    top_ps: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,  # set to 0 for the runs that are out
    survivors: tl.tensor,  # [num_rows, num_runs], written: runs that may hold ids to draw, ascending
    counts: tl.tensor,  # written: how many they are
    leasts: tl.tensor,  # written: what min-p asks for, -inf for a row without filters
    totals: tl.tensor,  # written: the mass of all ids relative to the best
    num_runs: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """From the peaks alone, find the runs that the filters can leave anything of: a program per row."""
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p = tl.load(temperatures + row), tl.load(log_min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    run = tl.arange(0, BLOCK)
    at = row * num_runs + run
    real = run < num_runs
    peak = tl.load(peaks + at, mask=real, other=NEVER)
    most = tl.max(peak, 0)
    least = tl.cast(NEVER, tl.float32)
    if (temperature > 0) & _filters(log_min_p, top_k, top_p) & (tl.abs(most) < float("inf")):
        peak = tl.div_rn(peak, temperature)
        most = tl.div_rn(most, temperature)
        mass = tl.load(masses + at, mask=real, other=0.0)
        weight = tl.exp(peak - most)
        total = tl.sum(mass * weight, 0)
        least = most + log_min_p
        floor = least
        if top_k > 0:
            # The k best logits are at least as large as the k-th peak.
            floor = tl.maximum(floor, _largest(peak, tl.where(real, 1.0, 0.0), top_k.to(tl.float32)))
        elif log_min_p == NEVER:
            # The peaks are a part of the mass; where they reach top-p, the rest is not needed.
            floor = tl.maximum(floor, _largest(peak, weight, (total * top_p) * SLACK))
        alive = real & (peak >= floor)
        place = tl.cumsum(alive.to(tl.int32), 0) - 1
        tl.store(survivors + row * num_runs + place, run, mask=alive)
        tl.store(masses + at, tl.zeros_like(mass), mask=real & (peak < floor))
        tl.store(counts + row, tl.sum(alive.to(tl.int32), 0))
        tl.store(totals + row, total)
    tl.store(leasts + row, least)


@kept
@triton.jit
def restrict(
    logits: tl.tensor,
    temperatures: tl.tensor,
    log_min_ps: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,  # written: of what is left
    survivors: tl.tensor,
    counts: tl.tensor,
    leasts: tl.tensor,  # raised to the least logit / temperature that may be drawn
    totals: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    num_runs: tl.tensor,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
) -> None:
    """Find the exact thresholds among the runs that `bound` left, and their masses: a program per row."""
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p = tl.load(temperatures + row), tl.load(log_min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    run = tl.arange(0, BLOCK)
    most = tl.max(tl.load(peaks + row * num_runs + run, mask=run < num_runs, other=NEVER), 0)
    if (temperature > 0) & _filters(log_min_p, top_k, top_p) & (tl.abs(most) < float("inf")):
        most = tl.div_rn(most, temperature)
        logits += row * row_stride
        survivors += row * num_runs
        count = tl.load(counts + row)
        least = tl.load(leasts + row)
        if top_k > 0:
            kth = _search(logits, survivors, count, vocab, temperature, most, least, top_k.to(tl.float64), True, RUNS)
            least = tl.maximum(least, kth)
        if top_p < 1:
            total = tl.load(totals + row).to(tl.float64)
            if (top_k > 0) | (log_min_p > NEVER):
                total = _mass(logits, survivors, count, vocab, temperature, most, least, RUNS)
            wanted = total * top_p.to(tl.float64)
            last = _search(logits, survivors, count, vocab, temperature, most, least, wanted, False, RUNS)
            least = tl.maximum(least, last)
        tl.store(leasts + row, least)
        for first in range(0, count, RUNS):
            which = first + tl.arange(0, RUNS)
            mine, x = _tile(logits, survivors, which, count, vocab, temperature)
            peak = tl.max(x, 1)
            centre = tl.where(peak > NEVER, peak, 0.0)
            weights = tl.where(x >= least, tl.exp(x - centre[:, None]), 0.0)
            tl.store(masses + row * num_runs + mine, tl.sum(weights, 1), mask=which < count)


@triton.jit
def _filters(log_min_p: tl.tensor, top_k: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    return (log_min_p > NEVER) | (top_k > 0) | (top_p < 1)


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """Return integers in the order of the floats."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _value(ordered: tl.tensor) -> tl.tensor:
    """Return the float that `_ordered` made this of; -inf of 0, which it makes of no number."""
    bits = tl.where(ordered >> 31 == 1, ordered & 0x7FFFFFFF, ordered ^ 0xFFFFFFFF)
    return tl.where(ordered == 0, NEVER, bits.to(tl.float32, bitcast=True))


@triton.jit
def _largest(x: tl.tensor, weight: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return the largest value for which what is at least as large weighs `wanted`; -inf when all weighs less."""
    order = _ordered(x)
    found = tl.cast(0, tl.uint32)
    for step in range(16):
        digit = tl.cast(1, tl.uint32) << (30 - 2 * step)
        reached = found
        for part in tl.static_range(1, 4):
            pivot = found + digit * part
            weighs = tl.sum(tl.where(order >= pivot, weight, 0.0), 0)
            reached = tl.where(weighs >= wanted, pivot, reached)
        found = reached
    return _value(found)


@triton.jit
def _tile(
    logits: tl.tensor,
    survivors: tl.tensor,
    which: tl.tensor,
    count: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
) -> tl.tensor:
    """Return some of the runs that are left, and their logits / temperature, [RUNS, RUN]."""
    run = tl.load(survivors + which, mask=which < count, other=0)
    ids = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = tl.load(logits + ids, mask=(which < count)[:, None] & (ids < vocab), other=NEVER)
    return run, tl.div_rn(sound(x), temperature)


@triton.jit
def _mass(
    logits: tl.tensor,
    survivors: tl.tensor,
    count: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    most: tl.tensor,
    least: tl.tensor,
    RUNS: tl.constexpr,
) -> tl.tensor:
    """Return the mass of what is at least `least`."""
    total = tl.zeros((RUNS, RUN), tl.float32)
    for first in range(0, count, RUNS):
        _, x = _tile(logits, survivors, first + tl.arange(0, RUNS), count, vocab, temperature)
        total += tl.where(x >= least, tl.exp(x - most), 0.0)
    return tl.sum(total).to(tl.float64)


@triton.jit
def _search(
    logits: tl.tensor,
    survivors: tl.tensor,
    count: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    most: tl.tensor,
    least: tl.tensor,
    wanted: tl.tensor,
    COUNTS: tl.constexpr,
    RUNS: tl.constexpr,
) -> tl.tensor:
    """Return the largest logit for which those at least as large number or weigh `wanted`, two bits a round."""
    found = tl.cast(0, tl.uint32)
    for step in range(16):
        digit = tl.cast(1, tl.uint32) << (30 - 2 * step)
        low = tl.zeros((RUNS, RUN), tl.float32)
        middle, high = low, low
        for first in range(0, count, RUNS):
            _, x = _tile(logits, survivors, first + tl.arange(0, RUNS), count, vocab, temperature)
            order = _ordered(x)
            weight = tl.where(x >= least, 1.0 if COUNTS else tl.exp(x - most), 0.0)
            low += tl.where(order >= found + digit, weight, 0.0)
            middle += tl.where(order >= found + 2 * digit, weight, 0.0)
            high += tl.where(order >= found + 3 * digit, weight, 0.0)
        found += digit * (_reaches(low, wanted) + _reaches(middle, wanted) + _reaches(high, wanted))
    return _value(found)


@triton.jit
def _reaches(weights: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    return (tl.sum(weights).to(tl.float64) >= wanted).to(tl.uint32)
