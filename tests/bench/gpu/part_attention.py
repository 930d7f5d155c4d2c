"""Attention alone, as the layers call it: bytes/s of decoding, FLOP/s of prompts.

One layer's keys and values lie scattered over a paged cache; calls rotate through sets of sequences that no cache of
the device holds together, replayed as one CUDA graph, so that the host's launches are not in the figure. `sdpa` is
torch's own attention to keys and values that lie side by side, without a store: what there is to come near to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import AttentionBackend, AttentionSpec, LayerCache
from engine.attention.select import select_backend
from engine.config import ATTENTION_BACKENDS
from engine.errors import ConfigError
from engine.inputs.step_buffers import to_device
from engine.report import StepInputs
from tests.bench.gpu.bench import Bench, NotHere
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import Limits
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.shapes import Shape
from tests.bench.gpu.timing import rotations, seconds_per_call

MODEL = "qwen3-8b"  # whose heads are measured
SDPA = "sdpa"
POOL_BYTES = 48 << 30  # most that the cache of one measurement takes


@dataclass(frozen=True, slots=True)
class Case:
    """One step of `batch` sequences: `new` tokens each, of which the last sees `context` tokens."""

    backend: str
    batch: int
    context: int
    new: int = 1
    page: int = 16
    fp8: bool = False

    @property
    def name(self) -> str:
        """Name of its figure."""
        kind = f"new-{self.new}/" if self.new > 1 else ""
        return f"attention/{self.backend}/{kind}{self.batch}x{self.context}/page-{self.page}{'-fp8' * self.fp8}"


def part(scale: Scale) -> Part:
    """Return what is measured of every backend."""
    shape = scale.shape(MODEL)
    found = cases(scale)
    figures = tuple(_figure(case) for case in found)
    heads = f"{shape.heads} heads, {shape.kv_heads} of K and V, {shape.head_dim} wide"
    title = f"Attention and the store of new K and V, alone ({heads})"
    return Part("attention", title, figures, lambda bench: _run(bench, shape, found))


def cases(scale: Scale) -> list[Case]:
    """Return all of them: lengths and batches, page sizes, fp8, and prompts."""
    found = []
    for backend in scale.backends:
        found += [Case(backend, batch, context) for batch, context in scale.attention]
        pages = [page for page in scale.pages if page != scale.pages[0]]
        found += [Case(backend, *where, page=page) for where in scale.paged for page in pages]
        found += [Case(backend, *where, fp8=True) for where in scale.paged]
        found += [Case(backend, 1, context, new=scale.chunk) for context in (scale.chunk, 4 * scale.chunk)]
    # What is chosen may leave whole prompts to another kernel than any backend by its name.
    found += [Case("auto", batch, scale.chunk // batch, new=scale.chunk // batch) for batch in (1, 8)]
    found += [Case(SDPA, batch, context) for batch, context in scale.attention]
    return [*found, Case(SDPA, 1, scale.chunk, new=scale.chunk)]


def _figure(case: Case) -> Figure:
    where = "no pages" if case.backend == SDPA else f"pages of {case.page}{', fp8' * case.fp8}"
    if case.new > 1:
        several = f"{case.batch} x " * (case.batch > 1)
        what = f"{case.backend}: {several}{case.new:,} new tokens of {case.context:,}, {where}"
        return Figure(case.name, what, "TFLOP/s", lambda limits: limits.flops / 1e12)
    what = f"{case.backend}: batch {case.batch} x {case.context:,} tokens, {where}"
    return Figure(case.name, what, "TB/s", _bandwidth)


def _bandwidth(limits: Limits) -> float:
    return limits.bandwidth / 1e12


def _run(bench: Bench, shape: Shape, found: list[Case]) -> None:
    for case in found:
        bench.measure(lambda case=case: _rates(bench, shape, case), case.name)


def _rates(bench: Bench, shape: Shape, case: Case) -> list[float]:
    """Return TB/s of keys and values read, or TFLOP/s of causal attention."""
    width = 1 if case.fp8 else 2
    num_bytes = 2 * width * case.batch * case.context * shape.kv_heads * shape.head_dim
    sets = min(rotations(num_bytes), max(1, POOL_BYTES // num_bytes)) if bench.on_gpu else 2
    if case.backend == SDPA:
        calls = sdpa_calls(shape, case, int(sets), bench.device)
    else:
        calls = calls_of(_backend(bench, shape, case), case, int(sets))
    decode_step = case.new == 1
    times = seconds_per_call(calls, bench.device, bench.scale.repeats, graph=decode_step)
    if decode_step:
        return [num_bytes / seconds / 1e12 for seconds in times]
    seen = case.new * (case.context - case.new) + case.new * case.new / 2
    flop = 4.0 * shape.heads * shape.head_dim * seen * case.batch
    return [flop / seconds / 1e12 for seconds in times]


def plain_spec(
    heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype, device: torch.device, fp8: bool
) -> AttentionSpec:
    """Return attention without windows or a softcap."""
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        windows=(0,),
        softcap=0.0,
        block_size=page,
        dtype=dtype,
        device=device,
        fp8_cache=fp8,
    )


def _backend(bench: Bench, shape: Shape, case: Case) -> AttentionBackend:
    """Return the backend. Raises `NotHere` with its own reason where it cannot be used."""
    if case.backend not in ATTENTION_BACKENDS:
        raise NotHere(f"this version has no attention backend {case.backend}")
    if case.fp8 and not bench.on_gpu:
        raise NotHere("an fp8 cache needs a CUDA device")
    heads = shape.heads, shape.kv_heads, shape.head_dim
    spec = plain_spec(*heads, case.page, torch.bfloat16, bench.device, case.fp8)
    try:
        return select_backend(case.backend, spec)
    except ConfigError as error:
        raise NotHere(str(error)) from error


def calls_of(backend: AttentionBackend, case: Case, sets: int) -> list[Callable[[], Tensor]]:
    """Return calls that compute the same on `sets` sets of sequences, one layer's attention each."""
    spec, device = backend.spec, backend.spec.device
    per_sequence = -(-case.context // case.page)
    blocks = np.random.default_rng(0).permutation(sets * case.batch * per_sequence).astype(np.int32) + 1
    tables = blocks.reshape(sets, case.batch, per_sequence)
    cache = _cache(spec, len(blocks) + 1)
    tokens = case.batch * case.new
    query = _random((tokens, spec.num_heads, spec.head_dim), spec.dtype, device)
    key, value = (_random((tokens, spec.num_kv_heads, spec.head_dim), spec.dtype, device) for _ in range(2))
    metadata = [backend.prepare(to_device(_inputs(case, table), device)[0]) for table in tables]
    return [lambda one=one: backend.forward(query, key, value, cache, one, 0) for one in metadata]


def sdpa_calls(shape: Shape, case: Case, sets: int, device: torch.device) -> list[Callable[[], Tensor]]:
    """Return calls of torch's attention that compute what those of `calls_of` do, for decodes or whole prompts."""
    random = partial(_random, dtype=torch.bfloat16, device=device)
    query = random((case.batch, shape.heads, case.new, shape.head_dim))
    pairs = [random((2, case.batch, shape.kv_heads, case.context, shape.head_dim)) for _ in range(sets)]
    attend = partial(scaled_dot_product_attention, query, is_causal=case.new > 1, enable_gqa=True)
    return [partial(attend, *pair) for pair in pairs]


def _cache(spec: AttentionSpec, num_blocks: int) -> LayerCache:
    """Return one layer's cache, full of random keys and values."""
    shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    keys, values = (_random(shape, spec.cache_dtype, spec.device) for _ in range(2))
    return LayerCache(keys, values, torch.ones(2, spec.num_kv_heads, device=spec.device) if spec.fp8_cache else None)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    return drawn.to(dtype)


def _inputs(case: Case, table: np.ndarray) -> StepInputs:
    """Return the step of one set of sequences."""
    positions = np.tile(np.arange(case.context - case.new, case.context, dtype=np.int32), case.batch)
    owner = np.repeat(np.arange(case.batch), case.new)
    slots = table[owner, positions // case.page] * case.page + positions % case.page
    lens = np.full(case.batch, case.context, np.int32)
    return StepInputs(
        input_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_start_loc=(np.arange(case.batch + 1) * case.new).astype(np.int32),
        seq_lens=lens,
        num_computed_tokens=lens - np.int32(case.new),
        block_tables=table,
        logits_indices=(np.arange(1, case.batch + 1) * case.new - 1).astype(np.int32),
        copy_blocks=np.empty((0, 2), np.int32),
    )
