"""A plan as plain data and as lines for people."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.capacity.choice import Candidate
from deploy.capacity.fit import GpuFit
from deploy.capacity.links import NETWORK
from deploy.capacity.load import ExpectedLoad, ServiceEstimate
from deploy.capacity.rehearsal import Rehearsal
from deploy.capacity.step_time import Shares, StepTime
from deploy.cli.flags import in_flags
from deploy.cli.terminal import gib
from engine.config import USUAL_GROUP, EngineConfig

SHOWN = 5  # kinds of GPU in a comparison


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A model on GPUs, the times of its steps, and a load on it.

    prefill: the steps of a prompt of the load's length. decode: one step by the number of sequences. candidates:
    kinds of GPU that were compared, the least memory first. room: changes that make room for a second sequence, where
    there is room for one alone. rehearsal: the peak of one replica in virtual time, where it was asked for.
    """

    fit: GpuFit
    load: ExpectedLoad
    prefill: tuple[StepTime, ...]
    decode: dict[int, StepTime]
    service: ServiceEstimate
    candidates: tuple[Candidate, ...] = ()
    room: tuple[str, ...] = ()
    rehearsal: Rehearsal | None = None

    def public(self) -> dict[str, Any]:
        """Return the plan for JSON; bytes are those of one GPU, times are seconds."""
        fit, config, found = self.fit, self.fit.config, self.fit.footprint
        link = fit.gpu.link.for_ranks(config.tensor_parallel_size)
        return {
            "model": config.model,
            "architecture": fit.model.architecture,
            "parameters": found.parameters,
            "dtype": config.dtype,
            "quantization": config.quantization,
            "quantization_group_size": _group_size(config),
            "gpu": {key: value for key, value in asdict(fit.gpu).items() if key != "link"},
            "link": link.name if config.tensor_parallel_size > 1 else None,
            "tensor_parallel_size": config.tensor_parallel_size,
            "max_model_len": config.context_len,
            "max_model_len_lowered": fit.lowered_unasked,
            "bytes": {
                "gpu": fit.gpu.total_bytes,
                "allowed": fit.allowed_bytes,
                "weights": found.weight_bytes,
                "step": found.step_bytes,
                "graphs": found.graph_bytes,
                "other": fit.other_bytes,
                "kv_cache": fit.kv_bytes,
                "states": fit.state_bytes,
                "kv_block": found.block_bytes,
            },
            "num_kv_blocks": fit.num_blocks,
            "kv_tokens": fit.kv_tokens,
            "whole_sequences": fit.whole_sequences,
            "step": asdict(found.counts),
            "roofline": {
                "prefill": [_time(step, self.load.shares) for step in self.prefill],
                "decode": {str(count): _time(step, self.load.shares) for count, step in self.decode.items()},
            },
            "load": asdict(self.load),
            "service": asdict(self.service) | {"used": self.service.used},
            "candidates": [_candidate(each) for each in self.candidates],
            "rehearsal": None if self.rehearsal is None else asdict(self.rehearsal),
            "notes": notes(self),
        }

    def lines(self) -> list[str]:
        """Return the plan as text."""
        compared = [*self._compared(), ""] if self.candidates else []
        told = [f"Note: {note}" for note in notes(self)]
        return [
            *compared,
            *_head(self.fit),
            "",
            *_memory(self.fit),
            "",
            *self._times(),
            "",
            *self._service(),
            *self._rehearsed(),
            *(["", *told] if told else []),
        ]

    def _compared(self) -> list[str]:
        rows = [
            (
                f"{each.ranks} x {each.fit.gpu.name}",
                f"{each.cost:,.2f}",
                "" if each.service.replicas is None else f"--replicas {each.service.replicas}",
                f"{each.gpus} GPUs" if each.gpus > 1 else "1 GPU",
                f"TTFT {_ms(each.service.peak.ttft)}, TPOT {_ms(each.service.peak.tpot)}",
            )
            for each in self.candidates[:SHOWN]
        ]
        more = len(self.candidates) - SHOWN
        rest = [f"  {more} more kinds bear it with more memory"] if more > 0 else []
        share = "" if self.load.rps else " for 1,000 output tokens/s"
        return [f"GPUs that bear the load, by GB of GPU memory{share}", *_columns(rows), *rest]

    def _times(self) -> list[str]:
        shares, steps = self.load.shares, len(self.prefill)
        least = sum(step.seconds for step in self.prefill)
        expected = sum(step.expected(shares) for step in self.prefill)
        prompt = f"prompt of {self.load.input_len:,} tokens{f', {steps} steps' if steps > 1 else ''}"
        rows: list[tuple[str, ...]] = [("", "at least", "expected", "", "")]
        rows.append(_row(prompt, least, expected, self.load.input_len, self.prefill[-1].bound))
        for count, step in self.decode.items():
            who = "decode of 1 sequence" if count == 1 else f"decode of {count:,} sequences"
            rows.append(_row(who, step.seconds, step.expected(shares), count, step.bound))
        return [f"Steps, at {_speed(self.load)}", *_columns(rows, (1, 2)), f"  {self._parts()}"]

    def _parts(self) -> str:
        """Say what a decode step has beside products and bytes."""
        fit, step = self.fit, next(reversed(self.decode.values()))
        counts, ranks = fit.footprint.counts, fit.config.tensor_parallel_size
        parts = [f"{counts.launches:,} kernels ({_ms(step.launches)})"]
        if counts.exchanges:
            over = fit.gpu.link.for_ranks(ranks).name
            parts.append(f"{counts.exchanges:,} sums over {over} (at least {_ms(step.exchanges)})")
        hidden = "behind them" if step.overlaps else "between them"
        return f"A decode is {' and '.join(parts)}; the host plans for {_ms(step.host)} {hidden}."

    def _service(self) -> list[str]:
        load, done = self.load, self.service
        targets = [f"--{name} {value:g}" for name, value in (("ttft", load.ttft), ("tpot", load.tpot)) if value]
        under = f" under {' '.join(targets)}" if targets else ""
        rows = [
            (
                "one replica at most",
                f"{done.most.sequences:,.0f} sequence{'' if done.most.sequences == 1 else 's'}",
                f"{done.most.rps:,.2f} requests/s, {done.most.rps * load.output_len:,.0f} tokens/s, limited by "
                f"{done.limit}",
            ),
            (f"at the peak, {done.used:.0%} of that", f"{done.peak.rps:,.2f} requests/s", self._busy()),
            ("mean time to first token", _ms(done.peak.ttft), ""),
            ("mean time per output token", _ms(done.peak.tpot), ""),
        ]
        if done.replicas is not None:
            gpus = done.replicas * self.fit.config.tensor_parallel_size
            rows.append(
                (
                    f"{load.rps:g} requests/s need",
                    f"--replicas {done.replicas}",
                    f"{gpus} x {self.fit.gpu.name}{self._spare()}",
                )
            )
        return [f"Requests of {load.input_len:,} + {load.output_len:,} tokens{under}", *_columns(rows)]

    def _rehearsed(self) -> list[str]:
        found = self.rehearsal
        if found is None:
            return []
        rows = [
            ("", "mean", "p95"),
            ("time to first token", _ms(found.ttft), _ms(found.ttft_p95)),
            ("time per output token", _ms(found.tpot), _ms(found.tpot_p95)),
        ]
        title = f"One replica at the peak, in virtual time: {found.requests:,} requests, {found.rps:,.2f} a second"
        return ["", title, *_columns(rows, (1, 2))]

    def _busy(self) -> str:
        count = f"{self.service.peak.sequences:,.0f} sequences on average"
        after = ", when no spare replica is left" if self.service.replicas is not None and self.load.spare else ""
        return f"{count}{after}"

    def _spare(self) -> str:
        spare, replicas = self.load.spare, self.service.replicas or 0
        kept = f"{self.load.headroom:.0%} headroom" if self.load.headroom else "no headroom"
        return f": {replicas - spare} with {kept}, {spare} spare" if spare else f", with {kept} and no spare"


def notes(plan: CapacityPlan) -> list[str]:
    """Return notes for the deployment."""
    fit, found = plan.fit, []
    if fit.lowered_unasked:
        found.append(
            f"The context is lowered from the model's {fit.model.max_positions:,} tokens to the "
            f"{fit.config.context_len:,} that fit; --max-model-len says which you need."
        )
    if fit.whole_sequences < 2:
        more = f" More fit with {' or '.join(plan.room)}." if plan.room else ""
        found.append(
            f"It fits one sequence of {fit.config.context_len:,} tokens: a second one that long waits until the "
            f"first ends.{more}"
        )
    if fit.footprint.no_attention is not None:
        reason = in_flags(fit.footprint.no_attention)
        found.append(f"No attention made for GPUs serves it so, and the times above are of one: {reason}.")
    if not fit.footprint.graph_bytes and not fit.config.enforce_eager and fit.footprint.no_attention is None:
        why = (
            "ranks with whole experts wait for the host" if fit.config.enable_expert_parallel else "this model waits"
        )
        found.append(
            f"No CUDA graph replays its steps, as {why}: the host launches each of their "
            f"{fit.footprint.counts.launches:,} kernels."
        )
    if fit.config.tensor_parallel_size > 1 and fit.gpu.link.for_ranks(fit.config.tensor_parallel_size).network:
        found.append(
            f"So many ranks are on several nodes: {NETWORK.name} of {NETWORK.bandwidth * 8:g} Gb/s for each GPU is "
            "counted."
        )
    return found


def _group_size(config: EngineConfig) -> int | None:
    return (config.quantization_group_size or USUAL_GROUP) if config.quantization == "int4" else None


def _head(fit: GpuFit) -> list[str]:
    config, found = fit.config, fit.footprint
    group = f"{config.tensor_parallel_size} x {fit.gpu.name}"
    held = config.dtype if config.quantization is None else f"{config.dtype}, {config.weight_form} weights"
    return [f"{config.model}: {fit.model.architecture}, {_count(found.parameters)} parameters, {held}, on {group}"]


def _memory(fit: GpuFit) -> list[str]:
    found, config = fit.footprint, fit.config
    token = fit.footprint.block_bytes / config.block_size / 1024
    longest = fit.kv_tokens / config.context_len
    return [
        "Memory of each GPU",
        *_columns(
            [
                (f"{fit.gpu.name}, as CUDA reports it", gib(fit.gpu.total_bytes), ""),
                *([_utilization(fit)] if config.kv_cache_memory_bytes is None else []),
                ("weights", gib(found.weight_bytes), ""),
                (f"a step of {config.token_budget:,} tokens", gib(found.step_bytes), ""),
                *([("CUDA graphs", gib(found.graph_bytes), "estimate")] if found.graph_bytes else []),
                ("CUDA" if config.tensor_parallel_size == 1 else "CUDA and NCCL", gib(fit.other_bytes), "estimate"),
                ("KV cache", gib(fit.kv_bytes), f"{fit.kv_tokens:,} tokens of {token:,.1f} KiB"),
                *([("recurrent states", gib(fit.state_bytes), _states(fit))] if fit.state_bytes else []),
            ]
        ),
        f"  {_fitting(longest)} of {config.context_len:,} tokens at a time.",
    ]


def _utilization(fit: GpuFit) -> tuple[str, str, str]:
    return f"--gpu-memory-utilization {fit.config.gpu_memory_utilization:g}", gib(fit.allowed_bytes), ""


def _fitting(longest: float) -> str:
    return "It fits one sequence" if longest < 2 else f"It fits {longest:,.{int(longest < 100)}f} sequences"


def _states(fit: GpuFit) -> str:
    config, each = fit.config, fit.footprint.state_bytes / (1 << 20)
    return f"{config.max_num_seqs:,} sequences, {config.num_state_snapshots:,} snapshots of {each:,.1f} MiB"


def _candidate(each: Candidate) -> dict[str, Any]:
    return {
        "gpu": each.fit.gpu.name,
        "tensor_parallel_size": each.ranks,
        "replicas": each.service.replicas,
        "gpus": each.gpus,
        "cost": each.cost,
        "ttft": each.service.peak.ttft,
        "tpot": each.service.peak.tpot,
    }


def _time(step: StepTime, shares: Shares) -> dict[str, Any]:
    parts = ("compute", "memory", "exchanges", "launches", "host")
    return {
        "seconds": step.seconds,
        "expected": step.expected(shares),
        "bound": step.bound,
        **{part: getattr(step, part) for part in parts},
    }


def _row(who: str, least: float, expected: float, tokens: int, bound: str) -> tuple[str, ...]:
    return who, _ms(least), _ms(expected), f"{tokens / expected:,.0f} tokens/s", f"bound by {bound}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _speed(load: ExpectedLoad) -> str:
    if load.share is None:
        return "the shares of data sheet rates that an H100 was measured at"
    return f"{load.share:.0%} of data sheet rates"


def _columns(rows: Sequence[tuple[str, ...]], right: Collection[int] = (1,)) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"
