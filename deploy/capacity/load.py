"""What is asked of a service, and how many replicas that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deploy.capacity.fit import GpuFit
from deploy.capacity.steady import Flow, SteadyReplica, mean_context
from deploy.capacity.step_time import MEASURED, Shares
from engine.errors import ConfigError, flag

USUAL_INPUT, USUAL_OUTPUT = 1024, 256  # tokens of a request of which nothing else is said
USUAL_HEADROOM = 0.2  # share of a replica's rate that is kept free for bursts
MOST = 1e9  # requests a second, or seconds, that anybody means
USUAL_SPARE = 1  # replicas beyond those that bear the load: one may die at the peak
LEAST, NEARLY, EXACT = 1e-3, 0.98, 2e-3  # of the most requests a second: next to none, nearly all, and a difference


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """What is to be served, and how well.

    input_len, output_len: tokens of one request. rps: requests a second of all replicas, None = as many as one does.
    ttft, tpot: most seconds to the first token and between tokens, None = any. share: part of the data sheet's rates
    that is counted on, above 0 and at most 1, None = what was measured (`MEASURED`). headroom: share of a replica's
    rate that is kept free at the peak, from 0 and below 1. spare: replicas that may be lost at the peak.

    Raises `ConfigError` naming the flag.
    """

    input_len: int
    output_len: int
    rps: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    share: float | None = None
    headroom: float = USUAL_HEADROOM
    spare: int = USUAL_SPARE

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 token, not {getattr(self, name)}", name)
        for name, unit, works in (
            ("rps", "requests a second", "20"),
            ("ttft", "seconds", "1"),
            ("tpot", "seconds", "0.05"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST:
                raise ConfigError(
                    f"{name} must be above 0 and at most {MOST:,.0f} {unit}, such as {works}, not {value:g}", name
                )
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"roofline_share must be above 0 and at most 1, not {self.share:g}", "roofline_share")
        if not 0 <= self.headroom < 1:
            raise ConfigError(
                f"headroom must be from 0 and below 1 ({USUAL_HEADROOM:g} is usual), not {self.headroom:g}",
                "headroom",
            )
        if self.spare < 0:
            raise ConfigError(f"spare_replicas must be at least 0, not {self.spare}", "spare_replicas")

    @property
    def shares(self) -> Shares:
        """What parts of the data sheet's rates are counted on."""
        return MEASURED if self.share is None else Shares(*[self.share] * 4)

    @property
    def context(self) -> int:
        """Tokens that a sequence sees on average while it decodes."""
        return mean_context(self.input_len, self.output_len)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A load as it is asked for, with lengths that may be left open. Fields are those of `ExpectedLoad`."""

    input_len: int | None = None
    output_len: int | None = None
    rps: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    share: float | None = None
    headroom: float = USUAL_HEADROOM
    spare: int = USUAL_SPARE

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
        return ExpectedLoad(
            input_len, output_len, self.rps, self.ttft, self.tpot, self.share, self.headroom, self.spare
        )


@dataclass(frozen=True, slots=True)
class ServiceEstimate:
    """What replicas do under a load.

    most: one replica as full as targets, settings and cache allow. limit: what keeps it from doing more. peak: one
    replica at the peak, after the spare ones were lost; without a rate, at what the headroom leaves. replicas: with
    the spare ones; None where no rate was asked for.
    """

    most: Flow
    limit: str
    peak: Flow
    replicas: int | None

    @property
    def used(self) -> float:
        """Share of a replica's rate that is used at the peak, after the spare ones were lost."""
        return self.peak.rps / self.most.rps


def serve_load(fit: GpuFit, load: ExpectedLoad) -> ServiceEstimate:
    """Return what a load takes. Raises `ConfigError` naming the target or length that cannot be had."""
    room, limit = _room(fit, load)
    replica = SteadyReplica(fit, load.input_len, load.output_len, load.shares)
    most, limit = _within_targets(fit, load, replica, room, limit)
    allowed = most.rps * (1 - load.headroom)
    if load.rps is None:
        return ServiceEstimate(most, limit, replica.at(allowed), None)
    needed = math.ceil(load.rps / allowed)
    return ServiceEstimate(most, limit, replica.at(load.rps / needed), needed + load.spare)


def _room(fit: GpuFit, load: ExpectedLoad) -> tuple[int, str]:
    """Return the sequences that settings and cache have room for, and which of them has room for no more."""
    config, whole = fit.config, load.input_len + load.output_len
    if whole > config.context_len:
        raise ConfigError(
            f"input_len={load.input_len} and output_len={load.output_len} come to {whole} tokens, more than the "
            f"max_model_len={config.context_len} of a sequence here; {_remedy(fit, whole)}",
            "input_len",
        )
    held = (fit.num_blocks - 1) // -(-whole // config.block_size)
    return (held, "KV cache") if held < config.max_num_seqs else (config.max_num_seqs, flag("max_num_seqs"))


def _within_targets(
    fit: GpuFit, load: ExpectedLoad, replica: SteadyReplica, room: int, limit: str
) -> tuple[Flow, str]:
    """Return a replica as full as `room` and the targets allow, and what keeps it from more.

    Raises `ConfigError` naming the target that not even one request alone meets.
    """
    most = replica.full(room)
    idle = replica.at(most.rps * LEAST)
    for name, target in (("ttft", load.ttft), ("tpot", load.tpot)):
        if target is None:
            continue
        if getattr(idle, name) > target:
            raise ConfigError(
                f"{name}={target:g} s cannot be met: on {_group(fit)} it is {getattr(idle, name):.3g} s for one "
                f"request alone, at {_of_sheet(load)}",
                name,
            )
        found = _last(replica, name, target, most)
        if found.rps < most.rps:
            most, limit = found, flag(name)
    return most, limit


def _last(replica: SteadyReplica, name: str, target: float, most: Flow) -> Flow:
    """Return the replica at the highest rate, below that of `most`, at which a target is met; `most` where it is."""
    low, high = LEAST * most.rps, most.rps
    if getattr(replica.at(high * NEARLY), name) <= target and getattr(most, name) <= target:
        return most
    while high - low > EXACT * most.rps:
        middle = (low + high) / 2
        low, high = (middle, high) if getattr(replica.at(middle), name) <= target else (low, middle)
    return replica.at(low)


def _of_sheet(load: ExpectedLoad) -> str:
    return "the measured speed" if load.share is None else f"{load.share:.0%} of the roofline"


def _remedy(fit: GpuFit, tokens: int) -> str:
    if tokens > fit.model.max_positions:
        return f"the model has {fit.model.max_positions} positions: lower input_len or output_len"
    if fit.lowered_unasked:
        return "no more fits the memory"
    return f"raise max_model_len to {tokens}"


def _group(fit: GpuFit) -> str:
    return f"{fit.config.tensor_parallel_size} x {fit.gpu.name}"
