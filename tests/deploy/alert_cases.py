"""For each alert: figures for which it must fire, and figures close to them for which it must not.

Values are written as promtool does: `0+6x30` = 0, 6, 12, ... at each minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Series = Mapping[str, str]
MINUTES = 40
M = 'ray_io_cluster="c",model_name="m"'
R = f'{M},replica="r"'
UP_AND_DOWN = "0.99 0.8 0.7 " * (MINUTES // 3) + "0.8+0"  # what preempted sequences held is free for a while
SERVE = 'ray_io_cluster="c",application="squadron"'


@dataclass(frozen=True)
class Case:
    """Figures of `MINUTES` minutes. early: minutes at which the alert does not fire yet, though it will."""

    fires: Series
    quiet: Series
    early: int = 0


def metric(name: str, labels: str, values: str) -> dict[str, str]:
    """Return one series: `values` for a start, `+n` for what is added each minute."""
    return {f"ray_{name}{{{labels}}}": f"{values}x{MINUTES}"}


def ours(name: str, labels: str, values: str) -> dict[str, str]:
    """Return one series of a figure of our own."""
    return metric(f"squadron_{name}", labels, values)


def ends(outcome: str, per_minute: float) -> dict[str, str]:
    """Return requests that end so."""
    return ours("requests_ended_total", f'{M},router="a",outcome="{outcome}"', f"0+{per_minute:g}")


def copies(deployment: str, wanted: int, healthy: int) -> dict[str, str]:
    """Return what Serve says of a deployment."""
    labels = f'{SERVE},deployment="{deployment}"'
    return metric("serve_autoscaling_target_replicas", labels, f"{wanted}+0") | metric(
        "serve_deployment_replica_healthy", f'{labels},replica="x"', f"{healthy}+0"
    )


def first_tokens(below_one: int, below_five: int) -> dict[str, str]:
    """Return how many first tokens come within one second and within five, each minute."""
    found = ours("time_to_first_token_seconds_count", f'{M},router="a"', f"0+{below_five}")
    for bound, number in (("1.0", below_one), ("5.0", below_five), ("+Inf", below_five)):
        found |= ours("time_to_first_token_seconds_bucket", f'{M},router="a",le="{bound}"', f"0+{number}")
    return found


def at_night(outcome: str, *minutes: int) -> dict[str, str]:
    """Return one request that ends well every four minutes, and some that end so in these minutes."""
    counts = [sum(minute <= now for minute in minutes) for now in range(MINUTES)]
    label = f'{M},router="a",outcome="{outcome}"'
    return ends("completed", 0.25) | {f"ray_squadron_requests_ended_total{{{label}}}": " ".join(map(str, counts))}


def state(ready: int, live: int) -> dict[str, str]:
    """Return replicas that are ready, and requests under way."""
    return ours("replicas", f'{M},router="a",state="ready"', f"{ready}+0") | ours(
        "requests_live", f'{M},router="a"', f"{live}+0"
    )


def lost(reason: str, per_minute: float) -> dict[str, str]:
    """Return links that end for a reason."""
    return ours("links_lost_total", f'{M},router="a",reason="{reason}"', f"0+{per_minute:g}")


def dies(*minutes: int) -> dict[str, str]:
    """Return a replica that dies in each of these minutes; of equal ones, several at once."""
    counts = [sum(minute <= now for minute in minutes) for now in range(MINUTES)]
    return {f'ray_squadron_links_lost_total{{{M},router="a",reason="lost"}}': " ".join(map(str, counts))}


def failed_starts(number: int) -> dict[str, str]:
    """Return starts that failed in a row before the one that goes on."""
    return ours("replica_failed_starts", f'{M},router="a"', f"{number}+0")


def deployment_status(value: int, deployment: str = "Replica") -> dict[str, str]:
    """Return what Serve says of the state of a deployment."""
    return metric("serve_deployment_status", f'{SERVE},deployment="{deployment}"', f"{value}+0")


def cache(usage: str, preempted: int) -> dict[str, str]:
    """Return how full a KV cache is, and how many sequences are preempted each minute."""
    return ours("kv_cache_usage_perc", R, usage) | ours("num_preemptions_total", R, f"0+{preempted}")


def moves(migrations: float, accepted: float) -> dict[str, str]:
    """Return requests that move, and those taken in, each minute."""
    return ours("migrations_total", f'{M},router="a"', f"0+{migrations:g}") | ours(
        "requests_accepted_total", f'{M},router="a"', f"0+{accepted:g}"
    )


CASES = {
    "SquadronSilent": Case(ours("replicas", M, "1+0"), ours("requests_live", M, "0+0"), early=3),
    "SquadronNoReadyReplica": Case(
        state(ready=0, live=2) | ends("no_replica", 1), state(ready=0, live=2) | ends("no_replica", 0)
    ),
    "SquadronReplicasMissing": Case(copies("Replica-m", 3, 2), copies("Replica-m", 3, 3), early=8),
    "SquadronRouterLost": Case(copies("Router", 2, 0), copies("Router", 2, 2), early=1),
    "SquadronDeploymentFailed": Case(deployment_status(2), deployment_status(3), early=3),
    "SquadronCrashLoop": Case(dies(22, 24, 28, 31), dies(*[25] * 8) | lost("drained", 5) | lost("silent", 5)),
    "SquadronMigrationStorm": Case(
        moves(20, 100) | lost("lost", 0.5), moves(20, 100) | lost("lost", 0) | lost("drained", 1), early=3
    ),
    "SquadronHighErrorShare": Case(
        ends("completed", 90) | ends("replica_lost", 10),
        ends("completed", 98)
        | ends("internal_error", 2)
        | ends("aborted", 50)
        | ends("deadline_exceeded", 20)
        | ends("invalid_value", 50),
        early=3,
    ),
    "SquadronSlowFirstToken": Case(first_tokens(10, 100), first_tokens(99, 100), early=3),
    "SquadronQueueOld": Case(
        ours("queue_age_seconds", f'{M},router="a"', "31+1"), ours("queue_age_seconds", f'{M},router="a"', "20+0"), 3
    ),
    "SquadronDeadlineMisses": Case(
        ends("completed", 90) | ends("deadline_exceeded", 10),
        ends("completed", 98) | ends("deadline_exceeded", 2),
        early=3,
    ),
    "SquadronKVCacheFull": Case(cache(UP_AND_DOWN, 2), cache("0.99+0", 0), early=8),
    "SquadronMisplacedTokens": Case(
        ours("misplaced_rows_total", f'{M},router="a"', "0+1"), ours("misplaced_rows_total", f'{M},router="a"', "7+0")
    ),
}
