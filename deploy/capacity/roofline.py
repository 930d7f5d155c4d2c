"""The least time that steps can take: Williams, Waterman and Patterson, "Roofline" (2009).

A step multiplies and moves bytes at the same time, so that it takes as long as the slower of the two at the data
sheet's rates. What is not counted makes every real step slower: launches, host, collectives, activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deploy.capacity.fit import Fit, product_dtype
from engine.quantization.layers import quantization_of
from parallel.int8 import FEW_ROWS


@dataclass(frozen=True, slots=True)
class StepTime:
    """The least seconds of something, and whether operations or bytes bound it."""

    compute: float
    memory: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.compute, self.memory)

    @property
    def bound(self) -> str:
        """Which of the two it is."""
        return "compute" if self.compute >= self.memory else "memory"


class Roofline:
    """Least times on one tensor-parallel group."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        config, spec, found = fit.config, fit.spec, fit.footprint
        self._rate = fit.gpu.flops(config.dtype)
        # Products in fp8 count as so many fewer in the dtype, in which the output head and attention stay.
        self._in_layers = found.layer_products * self._rate / fit.gpu.flops(product_dtype(config, spec))
        quantization = quantization_of(config, spec)
        self._in_int8 = quantization is not None and quantization.weights == "int8"
        self._bandwidth = fit.gpu.bytes_per_second
        self._windows = [window or config.context_len for window in spec.sliding_windows]
        self._attention = 4 * found.num_heads * spec.head_dim  # operations of one query and one key, in one layer
        self._kv = found.block_bytes // (config.block_size * spec.num_layers)  # bytes of one token in one layer

    def prefill(self, tokens: int, cached: int = 0) -> list[StepTime]:
        """Return the steps of a prompt of `tokens`, the first `cached` of which are in the cache."""
        chunk = self._fit.config.max_num_batched_tokens
        return [self._chunk(first, min(chunk, tokens - first)) for first in range(cached, tokens, chunk)]

    def prefill_seconds(self, tokens: int) -> float:
        """Return the least time of a whole prompt, alone."""
        return sum(step.seconds for step in self.prefill(tokens))

    def decode(self, sequences: int, context: int) -> StepTime:
        """Return one step of `sequences` that each see `context` tokens, their new one included."""
        found = self._fit.footprint
        seen = sum(min(context, window) for window in self._windows)
        products = 2 * (self._in_layers + found.head_products) * sequences
        moved = self._weights(sequences) + sequences * (seen * self._kv + self._written)
        return self._time(products + self._attention * seen * sequences, moved)

    def _chunk(self, first: int, count: int) -> StepTime:
        """Return the step of the tokens from `first` on, which see those before them."""
        found = self._fit.footprint
        seen = sum(_seen(first, count, window) for window in self._windows)
        read = sum(min(first, window) for window in self._windows) * self._kv
        products = 2 * (self._in_layers * count + found.head_products)
        return self._time(products + self._attention * seen, self._weights(count) + read + count * self._written)

    def _weights(self, rows: int) -> int:
        """Return the bytes of weights that a step of so many rows moves: int8 is widened for many, and read again."""
        found, config = self._fit.footprint, self._fit.config
        widened = self._in_int8 and rows > FEW_ROWS
        return found.read_bytes + (2 * getattr(torch, config.dtype).itemsize * found.layer_products if widened else 0)

    @property
    def _written(self) -> int:
        """Bytes that one new token adds to the cache."""
        return self._kv * len(self._windows)

    def _time(self, operations: float, moved: float) -> StepTime:
        return StepTime(operations / self._rate, moved / self._bandwidth)


def _seen(first: int, count: int, window: int) -> int:
    """Return how many keys the queries at `first` to `first + count - 1` see together, each at most `window`."""
    rising = min(max(window - first, 0), count)  # queries that see all before them
    return rising * first + rising * (rising + 1) // 2 + (count - rising) * window
