"""Figures of replicas' engines: in each replica of its own, in a router of all as they last told them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric

from cluster.telemetry.samples import Labels, family_of
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
