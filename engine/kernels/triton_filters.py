"""The Triton kernels that find what min-p, top-k and top-p leave; runs, peaks and masses as in `triton_draw`."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.handles import kept
from engine.kernels.triton_draw import NEVER, RUN, sound

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
