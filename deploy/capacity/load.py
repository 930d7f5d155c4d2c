"""How many replicas a load takes, by the least time that steps can take.

Williams, Waterman and Patterson, "Roofline" (2009): a step multiplies and moves bytes at the same time, so that it
takes as long as the slower of the two at the data sheet's rates. What is not counted makes every real step slower:
launches, host, collectives, activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deploy.capacity.fit import GpuFit, product_dtype
from engine.errors import ConfigError, flag
from engine.kernels.base import FEW_ROWS
from engine.quantization.select import quantization_of


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

    def __init__(self, fit: GpuFit) -> None:
        self._fit = fit
        config, model, found = fit.config, fit.model, fit.footprint
        self._rate = fit.gpu.flops(config.dtype)
        # Products in fp8 count as so many fewer in the dtype, in which the output head and attention stay.
        self._in_layers = found.layer_products * self._rate / fit.gpu.flops(product_dtype(config, model))
        quantization = quantization_of(config, model.quantization)
        self._widened = quantization is not None and quantization.widened
        self._bandwidth = fit.gpu.bytes_per_second
        self._layers = [(layer, layer.window or config.context_len) for layer in found.attention]
        self._written = sum(layer.token_bytes for layer in found.attention)  # what one new token adds to the cache

    def prefill(self, tokens: int, cached: int = 0) -> list[StepTime]:
        """Return the steps of a prompt of `tokens`, the first `cached` of which are in the cache."""
        chunk = self._fit.config.token_budget
        return [self._chunk(first, min(chunk, tokens - first)) for first in range(cached, tokens, chunk)]

    def prefill_seconds(self, tokens: int) -> float:
        """Return the least time of a whole prompt, alone."""
        return sum(step.seconds for step in self.prefill(tokens))

    def decode(self, sequences: int, context: int) -> StepTime:
        """Return one step of `sequences` that each see `context` tokens, their new one included."""
        found = self._fit.footprint
        read = sum(min(context, window) * layer.token_bytes for layer, window in self._layers)
        attended = sum(min(context, window) * layer.pair_operations for layer, window in self._layers)
        products = 2 * (self._in_layers + found.head_products) * sequences
        return self._time(
            products + attended * sequences, self._weights(sequences) + sequences * (read + self._written)
        )

    def _chunk(self, first: int, count: int) -> StepTime:
        """Return the step of the tokens from `first` on, which see those before them."""
        found = self._fit.footprint
        attended = sum(_seen(first, count, window) * layer.pair_operations for layer, window in self._layers)
        read = sum(min(first, window) * layer.token_bytes for layer, window in self._layers)
        products = 2 * (self._in_layers * count + found.head_products)
        return self._time(products + attended, self._weights(count) + read + count * self._written)

    def _weights(self, rows: int) -> int:
        """Return the bytes of weights that a step of so many rows moves: some are widened, and read again."""
        found, config = self._fit.footprint, self._fit.config
        widened = self._widened and rows > FEW_ROWS
        return found.read_bytes + (2 * getattr(torch, config.dtype).itemsize * found.layer_products if widened else 0)

    def _time(self, operations: float, moved: float) -> StepTime:
        return StepTime(operations / self._rate, moved / self._bandwidth)


def _seen(first: int, count: int, window: int) -> int:
    """Return how many keys the queries at `first` to `first + count - 1` see together, each at most `window`."""
    rising = min(max(window - first, 0), count)  # queries that see all before them
    return rising * first + rising * (rising + 1) // 2 + (count - rising) * window


USUAL_INPUT, USUAL_OUTPUT = 1024, 256  # tokens of a request of which nothing else is said


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """What is to be served, and how well.

    input_len, output_len: tokens of one request. rps: requests a second of all replicas, None = as many as one does.
    ttft, tpot: most seconds to the first token and between tokens, None = any. share: part of the roofline's speed
    that is counted on, above 0 and at most 1.

    Raises `ConfigError` naming the flag.
    """

    input_len: int
    output_len: int
    rps: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 token, not {getattr(self, name)}", name)
        for name, unit in (("rps", "requests a second"), ("ttft", "seconds"), ("tpot", "seconds")):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0 {unit}, not {value:g}", name)
        if not 0 < self.share <= 1:
            raise ConfigError(f"roofline_share must be above 0 and at most 1, not {self.share:g}", "roofline_share")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A load as it is asked for, with lengths that may be left open. Fields are those of `ExpectedLoad`."""

    input_len: int | None = None
    output_len: int | None = None
    rps: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    share: float = 0.5

    def within(self, context: int) -> ExpectedLoad:
        """Return the load with lengths for a context of so many tokens: usual ones, or what there is room for.

        Raises `ConfigError` naming the flag.
        """
        input_len, output_len = self.input_len, self.output_len
        if output_len is None:
            room = context // 4 if input_len is None else context - input_len
            output_len = max(min(USUAL_OUTPUT, room), 1)
        if input_len is None:
            input_len = max(min(USUAL_INPUT, context - output_len), 1)
        return ExpectedLoad(input_len, output_len, self.rps, self.ttft, self.tpot, self.share)


@dataclass(frozen=True, slots=True)
class ServiceEstimate:
    """What replicas do under a load, at the share of the roofline that is counted on.

    sequences: that one replica decodes at a time. ttft, tpot: seconds, without a wait for other requests' prompts.
    rps: of one replica. replicas: None where no rate was asked for. limit: what keeps one replica from doing more.
    """

    sequences: int
    ttft: float
    tpot: float
    rps: float
    replicas: int | None
    limit: str


class SteadyReplica:
    """One replica in a steady state: `n` sequences decode, and as many prompts come as sequences end.

    While each of n sequences gets its `output_len` tokens, n prompts are computed beside them. So a token takes
    D(n) + n / output_len * P, of the roofline's decode step D and prompt P, and the replica does
    n / (output_len * that) requests a second, which grows with n.
    """

    def __init__(self, fit: GpuFit, load: ExpectedLoad) -> None:
        self._fit = fit
        self._load = load
        self._roofline = Roofline(fit)
        self._prompt = self._roofline.prefill_seconds(load.input_len) / load.share

    def tpot(self, sequences: int) -> float:
        """Return the seconds between two tokens of a sequence."""
        load = self._load
        context = load.input_len + (load.output_len + 1) // 2
        step = self._roofline.decode(sequences, context).seconds / load.share
        return step + sequences / load.output_len * self._prompt

    def ttft(self, sequences: int) -> float:
        """Return the seconds from a request to its first token: the step that runs, then its own prompt."""
        context = self._load.input_len + (self._load.output_len + 1) // 2
        return self._roofline.decode(sequences, context).seconds / self._load.share + self._prompt

    def most_sequences(self) -> tuple[int, str]:
        """Return how many sequences it may decode at a time, and what keeps it from more.

        Raises `ConfigError` naming the target that not even one sequence alone meets.
        """
        most, limit = self._room()
        for name, target, seconds in (
            ("ttft", self._load.ttft, self.ttft),
            ("tpot", self._load.tpot, self.tpot),
        ):
            if target is None or seconds(most) <= target:
                continue
            if seconds(1) > target:
                raise ConfigError(
                    f"{name}={target:g} s cannot be met: on {_group(self._fit)} it is {seconds(1):.3g} s for one "
                    f"request alone, at {self._load.share:.0%} of the roofline",
                    name,
                )
            most, limit = _last(most, seconds, target), flag(name)
        return most, limit

    def _room(self) -> tuple[int, str]:
        """Return the sequences that the settings and the cache have room for."""
        config, load = self._fit.config, self._load
        whole = load.input_len + load.output_len
        if whole > config.context_len:
            raise ConfigError(
                f"input_len={load.input_len} and output_len={load.output_len} come to {whole} tokens, more than the "
                f"max_model_len={config.context_len} of a sequence here; {_remedy(self._fit, whole)}",
                "input_len",
            )
        held = (self._fit.num_blocks - 1) // -(-whole // config.block_size)
        return (held, "KV cache") if held < config.max_num_seqs else (config.max_num_seqs, flag("max_num_seqs"))


def serve_load(fit: GpuFit, load: ExpectedLoad) -> ServiceEstimate:
    """Return what a load takes. Raises `ConfigError` naming the target or length that cannot be had."""
    replica = SteadyReplica(fit, load)
    most, limit = replica.most_sequences()
    tpot = replica.tpot(most)
    rate = most / (load.output_len * tpot)
    replicas = None if load.rps is None else math.ceil(load.rps / rate)
    return ServiceEstimate(most, replica.ttft(most), tpot, rate, replicas, limit)


def _last(most: int, seconds: Callable[[int], float], target: float) -> int:
    """Return the largest number below `most` that takes at most `target`; 1 does, `most` does not."""
    low = 1
    while low < most - 1:
        middle = (low + most) // 2
        low, most = (middle, most) if seconds(middle) <= target else (low, middle)
    return low


def _remedy(fit: GpuFit, tokens: int) -> str:
    if tokens > fit.model.max_positions:
        return f"the model has {fit.model.max_positions} positions: lower input_len or output_len"
    if fit.lowered_unasked:
        return "no more fits the memory"
    return f"raise max_model_len to {tokens}"


def _group(fit: GpuFit) -> str:
    return f"{fit.config.tensor_parallel_size} x {fit.gpu.name}"
