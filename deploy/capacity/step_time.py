"""How long a step takes: at least, and as the engine is expected to do it.

Williams, Waterman and Patterson, "Roofline" (2009): a step multiplies and moves bytes at the same time, so that it
takes as long as the slower of the two. Beside that, kernels follow each other, ranks sum, and the host plans the next
step while this one runs.

What the engine reaches was measured on one H100 (docs/gpu.md, 26 November 2026), and is carried over to other GPUs:

- Two steps give two unknowns, the share of the bandwidth and the time of a kernel: Qwen3-0.6B and Qwen3-8B decode
  one sequence in 1.325 and 6.441 ms of kernels, 288 and 368 of them, and read 1.31 and 15.2 GB. All decodes in bf16
  that were measured are then within 6 %, those in int8 and fp8 within 18 %.
- A step of 8,192 prompt tokens of Qwen3-8B takes 229.9 ms for 133.6 TFLOP: 0.59 of 989.5 TFLOP/s.
- Attention reads an fp8 cache at 2.0 of 3.35 TB/s.
- int8 weights in steps of more than 64 rows are made plain: 50.0 ms in the place of 21.3 for 6.95 billion weights.
- The host takes 0.87 to 2.2 ms of a step (kernels taken from steps of `--no-async-scheduling`); where it overlaps,
  0.12 to 0.19 ms of it still show. Without CUDA graphs a step of one sequence takes 11.3 ms for 368 kernels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deploy.capacity.fit import GpuFit, product_dtype
from engine.kernels.base import FEW_ROWS
from engine.quantization.select import quantization_of
from engine.report import StepInputs
from engine.worker.graph_sizes import graph_sizes, mixed_sizes
from parallel.symmetric import LIMITS

LAUNCH_SECONDS = 3.1e-6  # of each kernel, beside the bytes that it moves
EAGER_SECONDS = 28e-6  # of the host, for each kernel that no graph replays
HOST_SECONDS, HOST_SEQUENCE_SECONDS = 0.9e-3, 3e-6  # of a step, and of each sequence in it
SHOWN_SECONDS = 0.13e-3  # of the host's time that no overlapping hides


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the data sheet's rates that are counted on: of operations, and of bandwidth.

    fp8_cache: for the keys and values of an fp8 cache. widening: for weights that are made plain. All are above 0 and
    at most 1.
    """

    compute: float = 0.59
    memory: float = 0.85
    fp8_cache: float = 0.6
    widening: float = 0.22


MEASURED = Shares()


@dataclass(frozen=True, slots=True)
class StepTime:
    """The least seconds of each part of a step, at the data sheet's rates where there are any.

    compute: operations. weights, widening, cache: bytes, of weights as they are held, of those that are made plain,
    and of keys and values. exchanges: sums over ranks. launches: kernels following each other. host: the driver's
    CPU. overlaps: whether the host works while the device does. fp8_cache: whether keys and values are in fp8.
    """

    compute: float = 0.0
    weights: float = 0.0
    widening: float = 0.0
    cache: float = 0.0
    exchanges: float = 0.0
    launches: float = 0.0
    host: float = 0.0
    overlaps: bool = True
    fp8_cache: bool = False

    @property
    def memory(self) -> float:
        """Seconds of all bytes."""
        return self.weights + self.widening + self.cache

    @property
    def seconds(self) -> float:
        """The least time of the step."""
        return self._with_host(max(self.compute, self.memory) + self.exchanges + self.launches, 0.0)

    @property
    def bound(self) -> str:
        """Which part takes the longest."""
        parts = {
            "compute": self.compute,
            "memory": self.memory,
            "exchanges": self.exchanges,
            "launches": self.launches,
            "host": self.host,
        }
        return max(parts, key=lambda name: parts[name])

    def expected(self, shares: Shares) -> float:
        """Return the seconds of the step at so much of the data sheet's rates."""
        of_cache = shares.fp8_cache if self.fp8_cache else shares.memory
        moved = self.weights / shares.memory + self.widening / shares.widening + self.cache / of_cache
        return self._with_host(
            max(self.compute / shares.compute, moved) + self.exchanges + self.launches, SHOWN_SECONDS
        )

    def _with_host(self, device: float, shown: float) -> float:
        return max(device, self.host) + shown if self.overlaps else device + self.host


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one sequence that a step computes: `count` after `first` others."""

    first: int
    count: int


class Steps:
    """Times of the steps of one tensor-parallel group."""

    def __init__(self, fit: GpuFit) -> None:
        config, model, found = fit.config, fit.model, fit.footprint
        self._footprint, self._config = found, config
        self._rate = fit.gpu.flops(config.dtype)
        # Products in fp8 count as so many fewer in the dtype, in which the output head and attention stay, and the
        # rows of experts that multiply in one launch.
        in_fp8 = self._rate / fit.gpu.flops(product_dtype(config, model))
        self._experts = [
            (layer, alike, layer.products * (1.0 if layer.in_one_launch else in_fp8))
            for layer, alike in Counter(found.experts).items()
        ]
        of_experts = sum(layer.own * layer.products for layer in found.experts)
        self._outside = found.layer_products - of_experts  # what every token is multiplied by
        self._in_layers = self._outside * in_fp8 + sum(
            alike * layer.top_k * layer.own / layer.count * products for layer, alike, products in self._experts
        )
        self._read_by_all = found.read_bytes - sum(layer.own * layer.read_bytes for layer in found.experts)
        quantization = quantization_of(config, model.quantization)
        widened = quantization is not None and quantization.widened
        self._widened_bytes = 2 * getattr(torch, config.dtype).itemsize if widened else 0  # written, and read again
        self._bandwidth = fit.gpu.bytes_per_second
        self._layers = Counter((layer, layer.window or config.context_len) for layer in found.attention)
        self._written = sum(layer.token_bytes for layer in found.attention)  # what one new token adds to the cache
        self._ranks = config.tensor_parallel_size
        self._link = fit.gpu.link.for_ranks(self._ranks)
        self._graphs = (graph_sizes(config).largest, mixed_sizes(config).largest) if found.graph_bytes else (0, 0)

    def decode(self, sequences: float, context: float) -> StepTime:
        """Return a step of `sequences` that each see `context` tokens, their new one included."""
        return self.step(sequences, context)

    def prefill(self, tokens: int, cached: int = 0) -> list[StepTime]:
        """Return the steps of a prompt of `tokens`, alone, the first `cached` of which are in the cache."""
        chunk = self._config.token_budget
        chunks = [Chunk(first, min(chunk, tokens - first)) for first in range(cached, tokens, chunk)]
        return [self.step(0, 0, [each]) for each in chunks]

    def step(self, sequences: float, context: float, chunks: Sequence[Chunk] = ()) -> StepTime:
        """Return a step of `sequences` that each see `context` tokens, and of chunks of prompts beside them."""
        found, rows = self._footprint, sequences + sum(chunk.count for chunk in chunks)
        products = 2 * (self._in_layers * rows + found.head_products * (sequences + len(chunks)))
        attended = moved = 0.0
        for (layer, window), alike in self._layers.items():
            seen = sequences * min(context, window)
            pairs = seen + sum(_seen(each.first, each.count, window) for each in chunks)
            attended += alike * pairs * layer.pair_operations
            moved += alike * (seen + sum(min(each.first, window) for each in chunks)) * layer.token_bytes
        return StepTime(
            compute=(products + attended) / self._rate,
            weights=self._read(rows) / self._bandwidth,
            widening=self._widened_bytes * self._made_plain(rows) / self._bandwidth,
            cache=(moved + rows * self._written) / self._bandwidth,
            exchanges=self._exchanges(rows),
            launches=LAUNCH_SECONDS * (found.counts.launches + found.counts.exchanges),
            host=self._host(sequences + len(chunks), rows, bool(chunks)),
            overlaps=self._config.overlaps,
            fp8_cache=self._config.fp8_cache,
        )

    def of(self, inputs: StepInputs) -> StepTime:
        """Return the step that a scheduler has chosen."""
        counts = np.diff(inputs.query_start_loc)
        decodes = counts == 1
        sequences = int(decodes.sum())
        context = float(inputs.seq_lens[decodes].mean()) if sequences else 0.0
        ends, chunked = inputs.seq_lens[~decodes].tolist(), counts[~decodes].tolist()
        return self.step(
            sequences, context, [Chunk(end - count, count) for end, count in zip(ends, chunked, strict=True)]
        )

    def _read(self, rows: float) -> float:
        """Return the bytes of weights that so many rows read: of experts, those that at least one row chooses.

        Each row is taken to choose any `top_k` of a layer's experts alike, so that of n rows (1 - top_k / count)^n
        miss an expert.
        """
        missed = ((layer, alike, math.pow(1 - layer.top_k / layer.count, rows)) for layer, alike, _ in self._experts)
        return self._read_by_all + sum(
            alike * layer.own * layer.read_bytes * (1 - share) for layer, alike, share in missed
        )

    def _made_plain(self, rows: float) -> float:
        """Return the weights that products of so many rows make plain first, where they are quantised that way."""
        found = float(self._outside) if rows > FEW_ROWS else 0.0
        for layer, alike, _ in self._experts:
            if not layer.in_one_launch and rows * layer.top_k / layer.count > FEW_ROWS:
                found += alike * layer.own * layer.products
        return found

    def _exchanges(self, rows: float) -> float:
        """Return the seconds of all sums, as many bytes each as on average."""
        counts = self._footprint.counts
        if not counts.exchanges:
            return 0.0
        size = int(counts.token_bytes * rows) // counts.exchanges
        return counts.exchanges * self._link.sum_seconds(size, self._ranks, LIMITS.get(self._ranks, 0))

    def _host(self, sequences: float, rows: float, mixed: bool) -> float:
        """Return the seconds of the driver's CPU: planning, and launches that no graph replays."""
        replayed = rows <= self._graphs[1] if mixed else sequences <= self._graphs[0]
        counts = self._footprint.counts
        eager = 0.0 if replayed else EAGER_SECONDS * (counts.launches + counts.exchanges)
        return HOST_SECONDS + HOST_SEQUENCE_SECONDS * sequences + eager


def _seen(first: int, count: int, window: int) -> int:
    """Return how many keys the queries at `first` to `first + count - 1` see together, each at most `window`."""
    rising = min(max(window - first, 0), count)  # queries that see all before them
    return rising * first + rising * (rising + 1) // 2 + (count - rising) * window
