"""`squadron plan`."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from cluster.config import parse_config
from cluster.model_names import resolve_model
from deploy.capacity.fit import fit
from deploy.capacity.gpus import gpu_named
from deploy.capacity.load import Wanted, serve_load
from deploy.capacity.nearest import Asked, nearest
from deploy.capacity.report import CapacityPlan, make_plan
from deploy.cli.dry_run import read_spec
from engine.config import EngineConfig
from engine.errors import ConfigError
from parallel.errors import ShardingError


def show_plan(settings: dict[str, object], gpu: str, wanted: Wanted, as_json: bool) -> None:
    """Print the plan of a model. settings: those of `squadron serve`, the model included.

    Raises `ConfigError` or `CheckpointError`; what does not fit is refused with what comes nearest.
    """
    # What the engine would log of a context that it lowers is said in the plan.
    logging.getLogger("engine.kv.room").setLevel(logging.ERROR)
    plan = plan_capacity(parse_config(settings).engine, gpu, wanted)
    print(json.dumps(plan.public()) if as_json else "\n".join(plan.lines()))


def plan_capacity(config: EngineConfig, gpu: str, wanted: Wanted) -> CapacityPlan:
    """Return the plan of a model on GPUs of a kind under a load, from the model's config alone.

    Raises `ConfigError` with the nearest that does where it does not fit, and `CheckpointError`.
    """
    kind = gpu_named(gpu)
    spec = read_spec(resolve_model(config.model))
    loaded = Asked(config, spec, kind, lambda found: serve_load(found, wanted.within(found.config.context_len)))
    try:
        held = fit(config, spec, kind)
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
