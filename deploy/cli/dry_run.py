"""`--dry-run`: what a command line comes to, worked out before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import yaml

from cluster.app_config import AppConfig
from cluster.config import ClusterConfig
from cluster.resources import AppResources, ModelResources, model_resources
from deploy.cli.model_files import check_texts, each_model
from engine.config import EngineConfig
from engine.models.blueprint import blueprint
from engine.models.config import ModelConfig
from engine.resolve import check_model, resolve


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked configuration. `resolved` has what the model and this machine fill in; `config` is what was said."""

    config: ClusterConfig
    resolved: EngineConfig
    model: ModelConfig

    @property
    def placement(self) -> ModelResources:
        """Bundles and totals, on GPUs where the model runs on them."""
        return model_resources(self.config, (self.resolved.device or "cpu").startswith("cuda"))


def make_plan(config: ClusterConfig) -> Plan:
    """Check a configuration against the model's config file; no weight is read.

    Raises `ConfigError`, `CheckpointError` or `ShardingError`.
    """
    model = check_texts(config)
    resolved = resolve(config.engine, model)
    check_model(resolved, model)
    return Plan(config, resolved, model)


def make_plans(app: AppConfig) -> list[Plan]:
    """Check all models. Raises what `make_plan` does, naming the place of the model where there are several."""
    return each_model(app, make_plan)


def describe_plans(app: AppConfig, plans: Sequence[Plan]) -> str:
    """Return the resolved configuration as YAML that `--config` takes, and as comments what it would place."""
    filled = [
        ClusterConfig(**{**asdict(plan.config), **asdict(plan.resolved), "served_model_name": plan.config.names})
        for plan in plans
    ]
    values = replace(app, models=tuple(filled)).settings()
    for name, hidden in (("api_key", "***"), ("metrics_key", "****")):  # two keys may not be the same
        if values[name]:
            values[name] = hidden
    needs = AppResources(tuple([plan.placement for plan in plans]), app.shared.routers)
    lines = [line for plan in plans for line in _facts(plan)]
    lines.append(f"# Places {needs.routers} x router.")
    lines.append(f"# Needs {needs.cpus:g} CPUs and {needs.gpus:g} GPUs.")
    return yaml.safe_dump(values, sort_keys=False) + "\n".join(lines)


def _facts(plan: Plan) -> tuple[str, str]:
    config, model, placement = plan.config, plan.model, plan.placement
    heads = blueprint(model).heads
    bundle = ", ".join(f"{kind}: {amount:g}" for kind, amount in placement.bundles[0].items())
    return (
        f"# {config.model_id}: {model.architecture}, {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"vocabulary {model.vocab_size:,}, {heads}.",
        f"# Places {placement.replicas} x {len(placement.bundles)} ranks (replicas x tensor-parallel size) "
        f"in bundles of {{{bundle}}}.",
    )
