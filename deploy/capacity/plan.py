"""`squadron plan`: a plan from a model's config alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

from cluster.config import parse_config
from cluster.model_names import resolve_model
from deploy.capacity.choice import AUTO, RANKS, choose
from deploy.capacity.fit import Asked, GpuFit, fit, nearest, roomier
from deploy.capacity.gpus import GPUS, gpu_named
from deploy.capacity.load import ExpectedLoad, ServiceEstimate, Wanted, serve_load
from deploy.capacity.rehearsal import rehearse
from deploy.capacity.report import CapacityPlan
from deploy.capacity.step_time import Steps
from deploy.cli.model_files import read_model_config
from engine.config import EngineConfig
from engine.errors import ConfigError
from parallel.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Shown:
    """How a plan is shown. simulate: whether its peak is run, too.

    gpus_per_node: None = as many as the vendor's own boards have.
    """

    as_json: bool = False
    gpus_per_node: int | None = None
    simulate: bool = False


def show_plan(settings: dict[str, object], gpu: str, wanted: Wanted, shown: Shown) -> None:
    """Print the plan of a model. settings: those of `squadron serve`, the model included. gpu: or "auto".

    Raises `ConfigError` or `CheckpointError`; what does not fit is refused with what comes nearest.
    """
    # What the engine would log of a context that it lowers is said in the plan.
    logging.getLogger("engine.kv.cache_size").setLevel(logging.ERROR)
    config = parse_config(settings).engine
    if gpu.lower() == AUTO:
        ranks = (config.tensor_parallel_size,) if "tensor_parallel_size" in settings else RANKS
        plan = plan_smallest(config, wanted, shown.gpus_per_node, ranks)
    else:
        plan = plan_capacity(config, gpu, wanted, shown.gpus_per_node)
    if shown.simulate:
        plan = replace(plan, rehearsal=rehearse(plan.fit, plan.load, plan.service.peak))
    print(json.dumps(plan.public()) if shown.as_json else "\n".join(plan.lines()))


def plan_smallest(
    config: EngineConfig, wanted: Wanted, gpus_per_node: int | None = None, ranks: Collection[int] = RANKS
) -> CapacityPlan:
    """Return the plan on the GPUs that bear a load with the least memory. ranks: of a group, that are tried.

    Raises `ConfigError` where none bears it, and `CheckpointError`.
    """
    model = read_model_config(resolve_model(config.source), config.model_impl, config.hf_overrides)
    candidates = choose(config, model, wanted, [gpu.on_nodes(gpus_per_node) for gpu in GPUS.values()], ranks)
    best = candidates[0]
    sized = replace(config, tensor_parallel_size=best.ranks)
    plan = _with_room(make_plan(best.fit, best.load, best.service), Asked(sized, model, best.fit.gpu))
    return replace(plan, candidates=tuple(candidates))


def plan_capacity(config: EngineConfig, gpu: str, wanted: Wanted, gpus_per_node: int | None = None) -> CapacityPlan:
    """Return the plan of a model on GPUs of a kind under a load, from the model's config alone.

    Raises `ConfigError` with the nearest that does where it does not fit, and `CheckpointError`.
    """
    kind = gpu_named(gpu).on_nodes(gpus_per_node)
    model = read_model_config(resolve_model(config.source), config.model_impl, config.hf_overrides)
    loaded = Asked(config, model, kind, lambda found: serve_load(found, wanted.within(found.config.context_len)))
    try:
        held = fit(config, model, kind, loaded.measure)
    except ShardingError as error:
        raise _refusal(ConfigError(str(error), "tensor_parallel_size"), loaded) from error
    except ConfigError as error:
        raise _refusal(error, loaded) from error
    try:
        load = wanted.within(held.config.context_len)
        service = serve_load(held, load)
    except ConfigError as error:
        found = nearest(loaded)
        raise ConfigError(f"{error}. {_any(found)}" if found else str(error), error.flag) from error
    return _with_room(make_plan(held, load, service), loaded)


def _with_room(plan: CapacityPlan, asked: Asked) -> CapacityPlan:
    """Return the plan with what makes room for a second sequence, where there is room for one alone."""
    if plan.fit.whole_sequences > 1:
        return plan

    def accept(found: GpuFit) -> None:
        if found.whole_sequences < 2:
            raise ConfigError("one sequence fits", "max_model_len")

    longest = replace(asked.config, max_model_len=plan.fit.config.context_len, num_kv_blocks=None)
    return replace(plan, room=tuple(roomier(replace(asked, config=longest, accept=accept))))


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


def make_plan(fit: GpuFit, load: ExpectedLoad, service: ServiceEstimate) -> CapacityPlan:
    """Return the plan of a model that fits and of a load that it bears."""
    steps = Steps(fit)
    counts = sorted({1, round(service.most.sequences)})
    return CapacityPlan(
        fit,
        load,
        tuple(steps.prefill(load.input_len)),
        {count: steps.decode(count, load.context) for count in counts},
        service,
    )
