"""KV-aware routing against round robin and against the policy of Ray's PrefixCacheAffinityRouter.

    python -m tests.bench.routing [--requests 2000] [--clients 96] [--replicas 4] [--share 0.73] [--prefix 2048]
        [--seed 0]

Simulated replicas (real scheduler, block manager, reports and router; step times from a formula) in virtual time, so
the figures are the same on every machine. Workloads: prompts that share `--prefix` tokens with others of their group
and have 64 of their own, all groups as often ("shared") or by Zipf's law with exponent 1 ("skewed") or 1.6 ("hot"),
where the replicas' caches together hold `--share` of what all groups share; and prompts of which no two begin alike
("unique"). Clients ask one after the other, as many at a time as `--clients`. "busiest": prompt tokens of the busiest
replica over the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from cluster.errors import ApiError
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from tests.bench.shared_prefixes import Workload, oracle_hit_tokens
from tests.simulator.cluster import SimulatedCluster, SimulatedModel
from tests.simulator.virtual_time import run_virtually

BLOCK = 16
GROUPS = 64
RUNNING_BLOCKS = 12  # of each running sequence beyond what it shares: its own end, its output, one in the making
REUSED = ("shared", "skewed", "hot")
Setup = Callable[[Dispatcher], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run brought. hit_rate: share of prompt tokens found in a prefix cache; times in seconds."""

    hit_rate: float
    tokens_per_s: float
    ttft_p50: float
    ttft_p90: float
    rejects: int
    busiest: float  # most requests that a replica ran, as a multiple of the mean


def ours(name: str) -> tuple[DispatcherConfig, Setup]:
    """Return how to run one of our policies."""
    return DispatcherConfig(routing_policy=name), lambda dispatcher: None


def rays(imbalanced_threshold: float) -> tuple[DispatcherConfig, Setup]:
    """Return how to run Ray's."""

    def setup(dispatcher: Dispatcher) -> None:
        from tests.bench.ray_affinity import RayAffinity  # sets up logging of its own when it is imported

        dispatcher._replicas.selection.chooser = RayAffinity(Random(0), imbalanced_threshold)

    return DispatcherConfig(), setup


POLICIES = {
    "kv_aware": ours("kv_aware"),
    "round_robin": ours("round_robin"),
    "power_of_two": ours("power_of_two"),
    "ray_affinity": rays(float("inf")),
    "ray_affinity_10": rays(10),
}


def blocks_per_replica(replicas: int, clients: int, share: float, prefix: int) -> int:
    """Return the KV blocks of a replica, so that all together cache `share` of the groups' prefixes."""
    cached = share * GROUPS * prefix / BLOCK / replicas
    return int(cached) + 1 + RUNNING_BLOCKS * clients // replicas


def run(workload: Workload, policy: str, replicas: int, clients: int, share: float) -> Outcome:
    """Run a workload under a policy."""
    config, setup = POLICIES[policy]
    model = SimulatedModel(num_kv_blocks=blocks_per_replica(replicas, clients, share, workload.prefix))

    async def main() -> Outcome:
        async with SimulatedCluster(replicas, model, config) as cluster:
            setup(cluster.routers[0])
            return await drive(cluster, workload, clients)

    return run_virtually(main())


async def drive(cluster: SimulatedCluster, workload: Workload, clients: int) -> Outcome:
    """Let `clients` at a time ask for what is left of the workload."""
    loop, dispatcher = asyncio.get_running_loop(), cluster.routers[0]
    waits: list[float] = []
    rejects = tokens = 0

    async def client(left: Iterator[tuple[int, tuple[int, ...]]]) -> None:
        nonlocal rejects, tokens
        for number, prompt in left:
            begin, first = loop.time(), True
            try:
                async for chunk in dispatcher.generate(workload.request(number, prompt)):
                    if first:
                        waits.append(loop.time() - begin)
                        first = False
                    tokens += len(chunk.token_ids)
            except ApiError:
                rejects += 1

    left = iter(enumerate(workload.prompts()))
    start = loop.time()
    await asyncio.gather(*(client(left) for _ in range(clients)))
    took = loop.time() - start
    stats = [replica.stats for replica in cluster.replicas.values()]
    served = [one.prompt_tokens for one in stats]
    hits = sum(one.prefix_hit_tokens for one in stats)
    deciles = statistics.quantiles(waits, n=10)
    return Outcome(
        hits / sum(served), tokens / took, deciles[4], deciles[8], rejects, max(served) * len(served) / sum(served)
    )


def workloads(requests: int, prefix: int = 2048, seed: int = 0) -> list[Workload]:
    """Return what is run."""
    return [
        Workload("shared", GROUPS, 0.0, requests, prefix, seed=seed),
        Workload("skewed", GROUPS, 1.0, requests, prefix, seed=seed),
        Workload("hot", GROUPS, 1.6, requests, prefix, seed=seed),
        Workload("unique", 0, 0.0, requests // 2, prefix, seed=seed),
    ]


def measure(
    requests: int = 600, clients: int = 96, replicas: int = 4, share: float = 0.73
) -> dict[str, float | dict[str, dict[str, float]]]:
    """Return the figures by workload and policy, and tokens per second with reuse against those of peers."""
    figures = compare(workloads(requests), clients, replicas, share)
    rates = {policy: [figures[name][policy]["tokens_per_s"] for name in REUSED] for policy in POLICIES}
    ours = statistics.geometric_mean(rates["kv_aware"])
    ratios = {f"vs_{peer}": ours / statistics.geometric_mean(rates[peer]) for peer in ("round_robin", "ray_affinity")}
    return {**figures, **ratios}


def compare(
    chosen: list[Workload], clients: int, replicas: int, share: float
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures by workload and policy."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for workload in chosen:
        prompts = workload.prompts()
        capacity = replicas * (blocks_per_replica(replicas, clients, share, workload.prefix) - 1)
        best = oracle_hit_tokens(prompts, capacity, BLOCK) / sum(map(len, prompts))
        rows = figures[workload.name] = {"oracle": {"hit_rate": best}}
        for policy in POLICIES:
            found = run(workload, policy, replicas, clients, share)
            rows[policy] = {
                "hit_rate": found.hit_rate,
                "hit_rate_of_oracle": found.hit_rate / best if best else 1.0,
                "tokens_per_s": found.tokens_per_s,
                "ttft_p50_ms": found.ttft_p50 * 1e3,
                "ttft_p90_ms": found.ttft_p90 * 1e3,
                "rejects": float(found.rejects),
                "busiest": found.busiest,
            }
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=96)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.73)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chosen = workloads(given.requests, given.prefix, given.seed)
    for name, rows in compare(chosen, given.clients, given.replicas, given.share).items():
        print(f"\n{name:16}", *(f"{column:>18}" for column in rows["kv_aware"]))
        for policy, values in rows.items():
            print(f"{policy:16}", *(f"{value:18,.3f}" for value in values.values()))


if __name__ == "__main__":
    main()
