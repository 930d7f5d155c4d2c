"""Figures and accounts of replicas' engines: in each replica its own, in a router all as they last told them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric

from cluster.telemetry.samples import Labels, family_of
from cluster.wire.message_parts import Costs, Usage
from engine.report import EngineStats

_READ: Mapping[str, Callable[[EngineStats], float]] = {
    "num_requests_running": lambda stats: stats.num_running,
    "num_requests_waiting": lambda stats: stats.num_waiting,
    "kv_cache_usage_perc": lambda stats: stats.kv_usage,
    "outstanding_prompt_tokens": lambda stats: stats.outstanding_tokens,
    "prefix_cache_queries": lambda stats: stats.prefix_query_tokens,
    "prefix_cache_hits": lambda stats: stats.prefix_hit_tokens,
    "num_preemptions": lambda stats: stats.preemptions,
    "engine_prompt_tokens": lambda stats: stats.prompt_tokens,
    "engine_generation_tokens": lambda stats: stats.generated_tokens,
}
_UNITS: Mapping[str, Callable[[Usage], float]] = {
    "device_seconds": lambda used: used.device_seconds,
    "kv_block_seconds": lambda used: used.block_seconds,
}


def engine_metrics(model_name: str, engines: Mapping[str, EngineStats]) -> Iterable[Metric]:
    """Yield the figures of a model's engines, by replica."""
    for name, read in _READ.items():
        yield family_of(name, {(model_name, replica): read(stats) for replica, stats in engines.items()})
    blocks: dict[Labels, float] = {
        (model_name, replica, state): number
        for replica, stats in engines.items()
        for state, number in _blocks(stats).items()
    }
    yield family_of("kv_blocks", blocks)


def _blocks(stats: EngineStats) -> Mapping[str, int]:
    free, cached = stats.kv_blocks_free, stats.kv_blocks_cached
    return {"free": free, "cached": cached, "held": stats.kv_blocks_total - free - cached}


def account_metrics(model_name: str, accounts: Mapping[str, Costs]) -> Iterable[Metric]:
    """Yield the accounts of a model's replicas, by replica."""
    for unit, read in _UNITS.items():
        used = {(model_name, replica): costs for replica, costs in accounts.items()}
        yield family_of(unit, {labels: read(costs.total) for labels, costs in used.items()})
        yield family_of(f"idle_{unit}", {labels: read(costs.idle) for labels, costs in used.items()})
        tenants: dict[Labels, float] = {
            (*labels, name): read(usage) for labels, costs in used.items() for name, usage in costs.tenants.items()
        }
        yield family_of(f"tenant_{unit}", tenants)
    compiled: dict[Labels, float] = {
        (model_name, replica, name): seconds
        for replica, costs in accounts.items()
        for name, seconds in costs.grammars.items()
    }
    yield family_of("tenant_grammar_seconds", compiled)
