"""`squadron plan`: a plan from a model's config alone, as plain data and as lines for people."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.config import parse_config
from cluster.model_names import resolve_model
from deploy.capacity.fit import Asked, GpuFit, fit, nearest
from deploy.capacity.gpus import gpu_named
from deploy.capacity.load import ExpectedLoad, Roofline, ServiceEstimate, StepTime, Wanted, serve_load
from deploy.cli.flags import in_flags
from deploy.cli.model_files import read_model_config
from deploy.cli.terminal import gib
from engine.config import USUAL_GROUP, EngineConfig
from engine.errors import ConfigError
from parallel.errors import ShardingError


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A model on GPUs, the least times of its steps, and a load on it.

    prefill: the steps of a prompt of the load's length. decode: one step by the number of sequences.
    """

    fit: GpuFit
    load: ExpectedLoad
    prefill: tuple[StepTime, ...]
    decode: dict[int, StepTime]
    service: ServiceEstimate

    def public(self) -> dict[str, Any]:
        """Return the plan for JSON; bytes are those of one GPU, times are seconds."""
        fit, config, found = self.fit, self.fit.config, self.fit.footprint
        return {
            "model": config.model,
            "architecture": fit.model.architecture,
            "parameters": found.parameters,
            "dtype": config.dtype,
            "quantization": config.quantization,
            "quantization_group_size": _group_size(config),
            "gpu": asdict(fit.gpu),
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
            "roofline": {
                "prefill": [_time(step) for step in self.prefill],
                "decode": {str(count): _time(step) for count, step in self.decode.items()},
            },
            "load": asdict(self.load),
            "service": asdict(self.service),
            "notes": notes(fit),
        }

    def lines(self) -> list[str]:
        """Return the plan as text."""
        return [*_head(self.fit), "", *_memory(self.fit), "", *self._times(), "", *self._service(), *_notes(self.fit)]

    def _times(self) -> list[str]:
        least = sum(step.seconds for step in self.prefill)
        steps = f", {len(self.prefill)} steps" if len(self.prefill) > 1 else ""
        rows = [
            (
                f"prompt of {self.load.input_len:,} tokens{steps}",
                f"{1e3 * least:.1f} ms",
                f"{self.load.input_len / least:,.0f} tokens/s",
                f"bound by {self.prefill[-1].bound}",
            )
        ]
        for count, step in self.decode.items():
            who = "1 sequence" if count == 1 else f"{count:,} sequences"
            rate = f"{count / step.seconds:,.0f} tokens/s"
            rows.append((f"decode of {who}", f"{1e3 * step.seconds:.1f} ms", rate, f"bound by {step.bound}"))
        return ["Least time by the roofline, of data sheet rates", *_columns(rows)]

    def _service(self) -> list[str]:
        load, done = self.load, self.service
        targets = [f"--{name} {value:g}" for name, value in (("ttft", load.ttft), ("tpot", load.tpot)) if value]
        under = f" under {' '.join(targets)}" if targets else ""
        rows = [
            ("one replica decodes at a time", f"{done.sequences:,} sequences", f"limited by {done.limit}"),
            ("time to first token", f"{1e3 * done.ttft:,.0f} ms", ""),
            ("time per output token", f"{1e3 * done.tpot:,.1f} ms", ""),
            ("one replica does", f"{done.rps:,.2f} requests/s", f"{done.rps * load.output_len:,.0f} tokens/s"),
        ]
        if done.replicas is not None:
            gpus = done.replicas * self.fit.config.tensor_parallel_size
            rows.append(
                (f"{load.rps:g} requests/s need", f"--replicas {done.replicas}", f"{gpus} x {self.fit.gpu.name}")
            )
        title = (
            f"Requests of {load.input_len:,} + {load.output_len:,} tokens{under}, at {load.share:.0%} of the roofline"
        )
        return [title, *_columns(rows)]


def make_plan(fit: GpuFit, load: ExpectedLoad, service: ServiceEstimate) -> CapacityPlan:
    """Return the plan of a model that fits and of a load that it bears."""
    roofline = Roofline(fit)
    context = load.input_len + (load.output_len + 1) // 2
    counts = sorted({1, service.sequences})
    return CapacityPlan(
        fit,
        load,
        tuple(roofline.prefill(load.input_len)),
        {count: roofline.decode(count, context) for count in counts},
        service,
    )


def notes(fit: GpuFit) -> list[str]:
    """Return notes for the deployment."""
    found = []
    if fit.lowered_unasked:
        found.append(
            f"The context is lowered from the model's {fit.model.max_positions:,} tokens to the "
            f"{fit.config.context_len:,} that fit; --max-model-len says which you need."
        )
    if fit.footprint.no_attention is not None:
        reason = in_flags(fit.footprint.no_attention)
        found.append(f"No attention made for GPUs serves it so, and the times above are of one: {reason}.")
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
                (f"--gpu-memory-utilization {config.gpu_memory_utilization:g}", gib(fit.allowed_bytes), ""),
                ("weights", gib(found.weight_bytes), ""),
                (f"a step of {config.token_budget:,} tokens", gib(found.step_bytes), ""),
                *([("CUDA graphs", gib(found.graph_bytes), "estimate")] if found.graph_bytes else []),
                ("CUDA" if config.tensor_parallel_size == 1 else "CUDA and NCCL", gib(fit.other_bytes), "estimate"),
                ("KV cache", gib(fit.kv_bytes), f"{fit.kv_tokens:,} tokens of {token:,.1f} KiB"),
                *([("recurrent states", gib(fit.state_bytes), _states(fit))] if fit.state_bytes else []),
            ]
        ),
        f"  {longest:,.1f} sequences of {config.context_len:,} tokens fit at a time.",
    ]


def _states(fit: GpuFit) -> str:
    config, each = fit.config, fit.footprint.state_bytes / (1 << 20)
    return f"{config.max_num_seqs:,} sequences, {config.num_state_snapshots:,} snapshots of {each:,.1f} MiB"


def _notes(fit: GpuFit) -> list[str]:
    return ["", *(f"Note: {note}" for note in notes(fit))] if notes(fit) else []


def _time(step: StepTime) -> dict[str, Any]:
    return {"seconds": step.seconds, "bound": step.bound, "compute": step.compute, "memory": step.memory}


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if column == 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


def show_plan(settings: dict[str, object], gpu: str, wanted: Wanted, as_json: bool) -> None:
    """Print the plan of a model. settings: those of `squadron serve`, the model included.

    Raises `ConfigError` or `CheckpointError`; what does not fit is refused with what comes nearest.
    """
    # What the engine would log of a context that it lowers is said in the plan.
    logging.getLogger("engine.kv.cache_size").setLevel(logging.ERROR)
    plan = plan_capacity(parse_config(settings).engine, gpu, wanted)
    print(json.dumps(plan.public()) if as_json else "\n".join(plan.lines()))


def plan_capacity(config: EngineConfig, gpu: str, wanted: Wanted) -> CapacityPlan:
    """Return the plan of a model on GPUs of a kind under a load, from the model's config alone.

    Raises `ConfigError` with the nearest that does where it does not fit, and `CheckpointError`.
    """
    kind = gpu_named(gpu)
    model = read_model_config(resolve_model(config.source), config.model_impl, config.hf_overrides)
    loaded = Asked(config, model, kind, lambda found: serve_load(found, wanted.within(found.config.context_len)))
    try:
        held = fit(config, model, kind)
    except ShardingError as error:
        raise _refusal(ConfigError(str(error), "tensor_parallel_size"), loaded) from error
    except ConfigError as error:
        raise _refusal(error, loaded) from error
    try:
        load = wanted.within(held.config.context_len)
        return make_plan(held, load, serve_load(held, load))
    except ConfigError as error:
        found = nearest(loaded)
        raise ConfigError(f"{error}. {_any(found)}" if found else str(error), error.flag) from error


def _refusal(error: ConfigError, asked: Asked) -> ConfigError:
    """Return that a model does not fit, with what would do, or what would at least hold it without the load."""
    if found := nearest(asked):
        end = _any(found)
    elif found := nearest(replace(asked, accept=lambda _: None)):
        end = f"No single change bears the load; the model fits with {', '.join(found)}"
    else:
        end = "No single change of ranks, context, step, dtype or GPU does"
    return ConfigError(f"{error}. {end}", error.flag)


def _any(changes: list[str]) -> str:
    return f"{'Any of these does' if len(changes) > 1 else 'This does'}: {', '.join(changes)}"
