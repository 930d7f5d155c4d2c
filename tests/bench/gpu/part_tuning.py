"""The sizes of the Triton attention kernels: a few tiles in a first hour, `tests.bench.tune_attention` has all.

A figure for each, so that what is cut off keeps what it found; the last one names the row for `MEASURED` of
engine/attention/triton_fit.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.attention.base import AttentionSpec
from engine.attention.triton_fit import Tile, Tuning, padded, shape_of, unmeasured
from tests.bench.gpu.bench import Bench, NotHere
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.part_attention import Case, plain_spec
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.shapes import Shape
from tests.bench.tune_attention import does_not_fit, seconds

MODEL = "qwen3-8b"
# keys, warps, stages of decodes, whose rows are the group's; rows, keys, warps, stages of prompts: twelve together.
DECODE = ((64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 3), (128, 8, 3), (32, 4, 4))
PREFILL = ((64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3))
WAVES = (1, 2, 4)


def part(scale: Scale) -> Part:
    """Return what is tried."""
    shape = scale.shape(MODEL)
    spec = _spec(shape, torch.device("cpu"))
    figures = [Figure(name, what, "us", higher=False) for name, what in _tried(spec)]
    best = Figure("tuning/gain", "sizes that nobody measured take so much longer than the best of these", "x")
    title = f"Sizes of the attention kernels, {shape.heads} heads, {shape.kv_heads} of K and V, {shape.head_dim} wide"
    return Part("tuning", title, (*figures, best), lambda bench: _run(bench, shape))


def tiles(spec: AttentionSpec) -> tuple[list[Tile], list[Tile]]:
    """Return the tiles of decodes and those of prompts that are tried."""
    group = padded(spec.group)
    return [Tile(group, *size) for size in DECODE], [Tile(max(rows, group), *size) for rows, *size in PREFILL]


def _tried(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    decodes, prompts = tiles(spec)
    yield from ((_name("decode", tile), f"decodes, {_words(tile)}") for tile in decodes)
    yield from ((_name("waves", waves), f"decodes, the best of these tiles, {waves} waves") for waves in WAVES)
    yield from ((_name("prefill", tile), f"prompts, {_words(tile)}") for tile in prompts)


def _name(kind: str, tried: Tile | int) -> str:
    if isinstance(tried, Tile):
        return f"tuning/{kind}/{tried.rows}x{tried.keys}-{tried.warps}-{tried.stages}"
    return f"tuning/{kind}/{tried}"


def _words(tile: Tile) -> str:
    return f"{tile.rows} rows, {tile.keys} keys, {tile.warps} warps, {tile.stages} stages"


def _spec(shape: Shape, device: torch.device) -> AttentionSpec:
    return plain_spec(shape.heads, shape.kv_heads, shape.head_dim, 16, torch.bfloat16, device, False)


def _cases(scale: Scale) -> tuple[list[Case], list[Case]]:
    decodes = [Case("triton", *where) for where in (scale.attention[1], *scale.paged)]
    return decodes, [Case("triton", 1, scale.chunk * count, new=scale.chunk) for count in (1, 4)]


def _run(bench: Bench, shape: Shape) -> None:
    if not bench.on_gpu:
        raise NotHere("needs a CUDA device")
    spec = _spec(shape, bench.device)
    base = plain = unmeasured(spec, torch.cuda.get_device_capability(bench.device))
    (decode_cases, prompt_cases), (decodes, prompts) = _cases(bench.scale), tiles(spec)

    def measure(name: str, tuning: Tuning, cases: list[Case]) -> None:
        bench.measure(lambda: _microseconds(spec, tuning, cases), name)

    for tile in decodes:
        measure(_name("decode", tile), replace(base, decode=tile), decode_cases)
    base = replace(base, decode=_best(bench, "decode", decodes, base.decode))
    for waves in WAVES:
        measure(_name("waves", waves), replace(base, waves=waves), decode_cases)
    base = replace(base, waves=_best(bench, "waves", WAVES, base.waves))
    for tile in prompts:
        measure(_name("prefill", tile), replace(base, prefill=tile), prompt_cases)
    base = replace(base, prefill=_best(bench, "prefill", prompts, base.prefill))

    def gain() -> float:
        whole = [*decode_cases, *prompt_cases]
        found = _microseconds(spec, plain, whole) / _microseconds(spec, base, whole)
        bench.note(f"`{shape_of(spec, torch.cuda.get_device_name(bench.device))}: {base},`")
        return found

    bench.measure(gain, "tuning/gain")


def _microseconds(spec: AttentionSpec, tuning: Tuning, cases: list[Case]) -> float:
    """Return the mean over all cases, by their product. Raises `NotHere` for a tile that does not fit the GPU."""
    try:
        times = [seconds(spec, tuning, case) for case in cases]
    except Exception as error:
        if does_not_fit(error):
            raise NotHere("does not fit this GPU") from error
        raise
    return 1e6 * math.exp(sum(map(math.log, times)) / len(times))


def _best(bench: Bench, kind: str, tried: Sequence[Any], otherwise: Any) -> Any:
    """Return the fastest of those that were measured, now or before."""
    rows = [(bench.results.rows.get(_name(kind, one)), one) for one in tried]
    measured = [(row.value, one) for row, one in rows if row is not None and row.value is not None]
    return min(measured, key=lambda pair: pair[0])[1] if measured else otherwise
