"""Chooses how each linear layer multiplies, by a short measurement once the weights are in."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isqrt, log
from typing import Literal

import torch
from torch import Tensor, nn

from parallel.linear import ParallelLinear
from parallel.methods import ByRowCount, LinearMethod, PackedLinear, PlainLinear

ROW_COUNTS = (1, 8, 64, 256)  # row counts that are measured: single decode, small and large batches, prefill
# Plain must beat packed by this factor: less may be the noise of a busy machine, and replicas that choose differently
# round differently.
WORTHWHILE = 1.5
RUNS = 4  # timed runs per case; the quickest counts, since a busy machine only ever adds time
PROBES = 4  # rows tried, at least
PROBED_SUMS = 2**16  # results compared: rounded to bfloat16, only one in ten thousand shows another order of summing
# Slower than this is no CPU's doing: another process had the core, and the run says nothing about the method.
SLOWEST_BYTES = 2e9  # bytes/s
SLOWEST_FLOPS = 1e10  # floating-point operations/s

Name = Literal["plain", "packed"]
Shape = tuple[int, int, torch.dtype, int]  # out, in, dtype, threads


@dataclass(slots=True)
class LinearTimings:
    """What was measured, for reuse by layers and models of the same shapes; hand it from load to load.

    seconds: (out, in, dtype, threads) -> row count -> (plain, packed) seconds; row counts that did not fit the
    budget, or at which the machine was too busy to tell, are missing.
    single_row_differs: (out, in, dtype, threads) -> whether a packed product of one row has other bits than the same
    row among several.
    """

    seconds: dict[Shape, dict[int, tuple[float, float]]] = field(default_factory=dict)
    single_row_differs: dict[Shape, bool] = field(default_factory=dict)


def choose_methods(
    module: nn.Module,
    row_counts: Sequence[int] = ROW_COUNTS,
    timings: LinearTimings | None = None,
    budget: float = 0.25,
    extra_bytes: int = 0,
) -> LinearTimings:
    """Give each plain linear layer in `module` the method that measures best, and free weights nobody reads any more.

    Call once, after the weights are loaded and torch's thread count is set. Layers on other devices than the CPU and
    layers that were given another method already are left alone. Where nothing could be measured, packed is taken.

    row_counts: ascending numbers of rows to measure at.
    budget: seconds for all measurements together; what does not fit follows the nearest smaller row count.
    extra_bytes: memory for keeping both forms of a weight where each is better at some row counts. It costs more than
    memory: with one form, packed above all, a token's logits do not depend on what else is in its batch.
    """
    timings = timings or LinearTimings()
    layers = [layer for layer in module.modules() if isinstance(layer, ParallelLinear) and _is_open(layer)]
    owners = Counter(id(weight) for part in module.modules() for weight in part._parameters.values())
    new = {_shape(layer.weight) for layer in layers} - timings.seconds.keys()
    for layer in layers:
        weight, shape = layer.weight, _shape(layer.weight)
        packed = PackedLinear(weight)
        if shape not in timings.single_row_differs:
            timings.single_row_differs[shape] = single_row_differs(packed, weight)
        packed.pairs_single_row = timings.single_row_differs[shape]
        if shape not in timings.seconds:
            timings.seconds[shape] = measure(weight, packed, row_counts, budget / len(new))
        chosen = _choose(timings.seconds[shape], room=extra_bytes >= weight.nbytes)
        if len(set(chosen)) > 1:
            extra_bytes -= weight.nbytes
        layer.method = _combine(list(timings.seconds[shape]), chosen, PlainLinear(weight), packed)
        # An embedding tied to an output head still looks its rows up in the plain weight.
        if set(chosen) == {"packed"} and owners[id(weight)] == 1:
            layer.release_weight()
    return timings


@torch.inference_mode()
def measure(
    weight: Tensor, packed: PackedLinear, row_counts: Sequence[int], budget: float
) -> dict[int, tuple[float, float]]:
    """Return the seconds of (plain, packed) for as many of `row_counts` as fit into `budget` seconds.

    Row counts at which the machine was too busy to tell are left out.
    """
    plain = PlainLinear(weight)
    end = time.perf_counter() + budget
    found: dict[int, tuple[float, float]] = {}
    for rows in row_counts:
        x = torch.randn(rows, weight.shape[1], dtype=weight.dtype)
        slowest = weight.nbytes / SLOWEST_BYTES + 2 * rows * weight.numel() / SLOWEST_FLOPS
        seconds = _fastest([plain, packed], x, end)
        if max(seconds) < slowest:
            found[rows] = seconds[0], seconds[1]
        if time.perf_counter() > end:
            break
    return found


@torch.inference_mode()
def single_row_differs(packed: PackedLinear, weight: Tensor) -> bool:
    """Return whether `packed`, made of `weight`, rounds a single row otherwise than the same row among several."""
    probes = max(PROBES, -(-PROBED_SUMS // weight.shape[0]))
    x = torch.randn(probes, weight.shape[1], dtype=weight.dtype)
    among = packed.apply(x, None)
    return any(not torch.equal(packed.apply(x[row : row + 1], None)[0], among[row]) for row in range(probes))


def _fastest(methods: Sequence[LinearMethod], x: Tensor, end: float) -> list[float]:
    """Return the best of a few runs of each method, taken in turns so that a busy moment hits all alike."""
    best = [float("inf")] * len(methods)
    for run in range(1 + RUNS):  # the first run builds oneDNN's kernel and is seldom the best
        for index, method in enumerate(methods):
            began = time.perf_counter()
            method.apply(x, None)
            best[index] = min(best[index], time.perf_counter() - began)
        if run and time.perf_counter() > end:
            break
    return best


def _is_open(layer: ParallelLinear) -> bool:
    return isinstance(layer.method, PlainLinear) and PackedLinear.supports(layer.weight)


def _shape(weight: Tensor) -> Shape:
    return weight.shape[0], weight.shape[1], weight.dtype, torch.get_num_threads()


def _choose(seconds: dict[int, tuple[float, float]], room: bool) -> list[Name]:
    """Return the better method for each measured row count, or one for all where there is no room for both."""
    if not seconds:
        return ["packed"]
    chosen: list[Name] = ["plain" if plain * WORTHWHILE < packed else "packed" for plain, packed in seconds.values()]
    if room or len(set(chosen)) == 1:
        return chosen
    gain = sum(log(packed / plain) for plain, packed in seconds.values())
    return ["plain" if gain > len(seconds) * log(WORTHWHILE) else "packed"] * len(chosen)


def _combine(row_counts: list[int], chosen: list[Name], plain: PlainLinear, packed: PackedLinear) -> LinearMethod:
    methods: list[LinearMethod] = [plain if name == "plain" else packed for name in chosen]
    if len(set(chosen)) == 1:
        return methods[0]
    # Between two measured row counts the change is put at their geometric mean.
    return ByRowCount([isqrt(low * high) for low, high in pairwise(row_counts)], methods)
