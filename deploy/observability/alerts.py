"""All alerts, as a table and as the file of rules that Prometheus reads.

Their expressions are of metrics that Ray publishes: ours, and those of Serve's controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from cluster.router.counters import FAULTS
from cluster.wire.link import CLOSED, DRAINED, ENDS, PEER_ALIVE
from deploy.observability.promql import CLUSTER, SERVE_HEALTHY, SERVE_STATUS, SERVE_WANTED, metric

Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `lasting`: how long the expression must hold, as Prometheus writes it.

    severity: critical = clients see it now; warning = they will, or may. summary: one line, of its labels.
    description: what it means, and the next command.
    """

    name: str
    expr: str
    lasting: str
    severity: Severity
    summary: str
    description: str


RAYSERVICE_MARK = "OWN_RAYSERVICE"  # the chart replaces this by the name of the release's RayService
NAMESPACE_MARK = "OWN_NAMESPACE"


@dataclass(frozen=True, slots=True)
class Scope:
    """The series that alerts read. matchers: added to every selector, none = all that Prometheus has.

    labels: added to every alert, besides its severity.
    """

    matchers: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def of(self, metric: str, *more: str) -> str:
        """Return the selector of a metric. more: further matchers."""
        return f"{metric}{{{','.join((*self.matchers, *more))}}}" if self.matchers or more else metric


EVERYTHING = Scope()
# KubeRay calls a RayService's clusters NAME-abcde, and before version 1.4 NAME-raycluster-abcde. Prometheus' operator
# puts the namespace to each series: a release of the same name may be in another one.
RELEASE = Scope(
    (f'{CLUSTER}=~"{RAYSERVICE_MARK}(-raycluster)?-[a-z0-9]{{5}}"', f'namespace="{NAMESPACE_MARK}"'),
    {"namespace": NAMESPACE_MARK, "ray_service": RAYSERVICE_MARK},
)


TTFT_SECONDS = 2.0  # target of the time to the first token; the chart has a value for it
FEW = 5  # requests within FEW_WITHIN: an alert about a share needs at least so many
FEW_TOKENS = 20  # first tokens within FEW_WITHIN: with fewer, the 95th percentile is the slowest alone
FEW_WITHIN = "15m"
TTFT_MARK = "TTFT_TARGET_SECONDS"  # the chart replaces this by its value
MODEL = f"{CLUSTER}, model_name"
REPLICA = f"{MODEL}, replica"
DEPLOYMENT = f"{CLUSTER}, deployment"
REPLICAS = 'deployment=~"Replica.*"'
DEPLOYMENTS = 'deployment=~"Router|Batches|Replica.*"'  # other apps on the same Ray are not ours
OF_MODEL = "{{ $labels.model_name }}"
ERRORS = "|".join(FAULTS)  # a deadline is the client's, and has an alert of its own
UNSERVED = "no_replica|replica_lost"  # codes of a request for which no replica was ready in time
DEATHS = "|".join(code for code in ENDS if code not in PEER_ALIVE)  # reasons by which a link ends with its replica
PLANNED = f"{CLOSED}|{DRAINED}"  # reasons by which links end at an update or a scale-down


def alerts(ttft: str = f"{TTFT_SECONDS:g}", scope: Scope = EVERYTHING) -> tuple[Alert, ...]:
    """Return all alerts. ttft: seconds that the 95th percentile of the time to the first token may take."""
    return (
        *_of_service(scope),
        *_of_copies(scope),
        *_of_deaths(scope),
        *_of_requests(scope, ttft),
        *_of_engines(scope),
    )


def _of_service(scope: Scope) -> tuple[Alert, ...]:
    unserved = scope.of(metric("requests_ended"), f'outcome=~"{UNSERVED}"')
    ready = scope.of(metric("replicas"), 'state="ready"')
    return (
        Alert(
            "SquadronSilent",
            f"absent({scope.of(metric('requests_live'))})",
            "5m",
            "critical",
            "No router of Squadron reports metrics",
            "Either nothing runs, or Prometheus does not reach Ray's metrics. Next: run `kubectl get rayservice` and "
            "`squadron status --address URL`. If the server is ready, check the PodMonitor and "
            "networkPolicy.monitoring.",
        ),
        Alert(
            "SquadronNoReadyReplica",
            f"max by ({MODEL}) ({ready}) == 0 and on ({MODEL}) sum by ({MODEL}) (increase({unserved}[5m])) > 0",
            "1m",
            "critical",
            f"Requests for {OF_MODEL} get 503, and no replica is ready",
            "A model that starts from zero replicas raises this only after clients have waited for "
            "cold_start_timeout. Next: run `squadron status`, which says for each replica what keeps it from "
            "serving, then `squadron doctor` on its node.",
        ),
    )


def _of_copies(scope: Scope) -> tuple[Alert, ...]:
    """Return alerts on the copies that Serve wants and that do not pass its checks.

    Serve has no series for replicas of which none ever passed: they count as 0. Routers without a series are still
    being installed and raise no alert; once they have passed and are gone, their series is 0.
    """
    healthy, wanted = (scope.of(name, 'deployment="Router"') for name in (SERVE_HEALTHY, SERVE_WANTED))
    replicas_healthy, replicas_wanted = (
        f"sum by ({DEPLOYMENT}) ({scope.of(name, REPLICAS)})" for name in (SERVE_HEALTHY, SERVE_WANTED)
    )
    status = f"max by ({DEPLOYMENT}) ({scope.of(SERVE_STATUS, DEPLOYMENTS)})"
    return (
        Alert(
            "SquadronReplicasMissing",
            f"{replicas_wanted} - ({replicas_healthy} or {replicas_wanted} * 0) > 0",
            "10m",
            "warning",
            "{{ $value }} replicas of {{ $labels.deployment }} are missing",
            "The other replicas carry the load. Next: run `squadron status`. Pending replicas wait for pods or GPUs, "
            "starting ones load weights, crash-looping ones show their reason.",
        ),
        Alert(
            "SquadronRouterLost",
            f"sum by ({CLUSTER}) ({wanted}) - sum by ({CLUSTER}) ({healthy}) > 0",
            "2m",
            "critical",
            "{{ $value }} routers are missing",
            "Other routers have the streams of the dead one, and none has started in its place. Next: run "
            "`squadron status`, then read the log of Serve's controller on the head (`kubectl logs`).",
        ),
        Alert(
            "SquadronDeploymentFailed",
            f"{status} > 0 and {status} <= 2",
            "5m",
            "critical",
            "Ray Serve has stopped trying to deploy {{ $labels.deployment }}",
            "An update failed and the previous version serves, or copies keep failing their checks. Next: "
            "`squadron status` gives the reason; correct the settings, or run `squadron doctor` on the node.",
        ),
    )


def _of_deaths(scope: Scope) -> tuple[Alert, ...]:
    lost = metric("links_lost")
    died = scope.of(lost, f'reason=~"{DEATHS}"')
    failed_starts = f"max_over_time({scope.of(metric('replica_failed_starts'))}[5m])"
    unplanned = scope.of(lost, f'reason!~"{PLANNED}"')
    moved, accepted = (scope.of(metric(name)) for name in ("migrations", "requests_accepted"))
    return (
        Alert(
            "SquadronCrashLoop",
            # Counts minutes with deaths, so that replicas that die with their node count once.
            f"max by ({MODEL}) (changes(sum by ({MODEL}, router) ({died})[15m:1m])) > 3 "
            f"or max by ({MODEL}) ({failed_starts}) > 2",
            "0m",
            "critical",
            f"Replicas of {OF_MODEL} keep dying: {{{{ $value }}}} times so far",
            "Replicas died in more than three of the last 15 minutes, or more than two starts in a row failed. "
            "Streams continue on the replicas that are left. Next: `squadron status` says why the last start failed; "
            "`squadron doctor` on the node checks memory, GPUs and disks.",
        ),
        Alert(
            "SquadronMigrationStorm",
            f"sum by ({MODEL}) (rate({moved}[10m])) / (sum by ({MODEL}) (rate({accepted}[10m])) > 0) > 0.1 "
            f"and on ({MODEL}) sum by ({MODEL}) (increase({unplanned}[10m])) > 0 {_at_least(FEW, moved)}",
            "5m",
            "warning",
            f"{{{{ $value | humanizePercentage }}}} of the requests for {OF_MODEL} move to another replica",
            f"Replicas are lost. Updates and scale-downs do not raise this, nor do fewer than {FEW} requests "
            f"within {FEW_WITHIN}. Clients see pauses, and prompts are computed again. Next: run "
            "`squadron status` to see whether replicas die or stall, and `squadron why ID` for one request.",
        ),
    )


def _of_requests(scope: Scope, ttft: str) -> tuple[Alert, ...]:
    ended = metric("requests_ended")
    failed, late = (scope.of(ended, one) for one in (f'outcome=~"{ERRORS}"', 'outcome="deadline_exceeded"'))
    per_model = f"sum by ({MODEL}) (rate({scope.of(ended)}[5m]))"
    first_tokens, counted = (scope.of(metric("time_to_first_token_seconds", end)) for end in ("_bucket", "_count"))
    return (
        Alert(
            "SquadronHighErrorShare",
            f"sum by ({MODEL}) (rate({failed}[5m])) / {per_model} > 0.05 {_at_least(FEW, failed)}",
            "5m",
            "critical",
            f"{{{{ $value | humanizePercentage }}}} of the requests for {OF_MODEL} end in errors",
            f"At least {FEW} requests within {FEW_WITHIN}. The panel `Requests by outcome` shows the codes. Next: "
            "run `squadron status`, and `squadron why ID` with the id of a failed answer.",
        ),
        Alert(
            "SquadronSlowFirstToken",
            f"histogram_quantile(0.95, sum by (le, {MODEL}) (rate({first_tokens}[5m]))) > {ttft} "
            f"{_at_least(FEW_TOKENS, counted)}",
            "5m",
            "warning",
            f"First tokens of {OF_MODEL} take {{{{ $value | humanizeDuration }}}} (p95)",
            f"The target is {ttft} s, over at least {FEW_TOKENS} first tokens within {FEW_WITHIN}. Next: "
            "`squadron why ID` says what one request waited for; `squadron top` shows whether requests queue; "
            "`squadron plan` says how many replicas a load needs.",
        ),
        Alert(
            "SquadronQueueOld",
            f"max by ({MODEL}) ({scope.of(metric('queue_age_seconds'))}) > 30",
            "5m",
            "warning",
            f"A request for {OF_MODEL} has waited {{{{ $value | humanizeDuration }}}} for its turn",
            "Requests arrive faster than the replicas answer; new ones will get 429. Next: `squadron top` "
            "shows which tenants send them; set a quota for the tenant, or raise max_replicas.",
        ),
        Alert(
            "SquadronDeadlineMisses",
            f"sum by ({MODEL}) (rate({late}[5m])) / {per_model} > 0.05 {_at_least(FEW, late)}",
            "5m",
            "warning",
            f"{{{{ $value | humanizePercentage }}}} of the requests for {OF_MODEL} miss their deadline",
            f"At least {FEW} requests within {FEW_WITHIN}. Clients allow less time than answers take. Next: "
            "`squadron why ID` says whether a request waited or ran.",
        ),
    )


def _of_engines(scope: Scope) -> tuple[Alert, ...]:
    return (
        Alert(
            "SquadronKVCacheFull",
            f"max by ({REPLICA}) (max_over_time({scope.of(metric('kv_cache_usage_perc'))}[5m])) > 0.95 "
            f"and on ({REPLICA}) sum by ({REPLICA}) (rate({scope.of(metric('num_preemptions'))}[5m])) > 0",
            "10m",
            "warning",
            f"The KV cache of replica {{{{ $labels.replica }}}} of {OF_MODEL} is full, and sequences are preempted",
            "Preempted sequences are computed again. Next: `squadron top` shows the KV cache and preemptions; "
            "`squadron plan` says how many tokens fit; lower --max-num-seqs or --max-model-len, or add replicas.",
        ),
        Alert(
            "SquadronMisplacedTokens",
            f"sum by ({MODEL}) (increase({scope.of(metric('misplaced_rows'))}[15m])) > 0",
            "0m",
            "warning",
            f"Replicas of {OF_MODEL} sent tokens that were not the next one",
            "The routers dropped these tokens and moved the requests, so clients got exact answers. This is a bug in "
            "Squadron. Next: run `squadron why ID`, and report it with the replica's log.",
        ),
    )


def _at_least(number: int, selector: str) -> str:
    """Return the end of an expression about a share: it holds from `number` events on."""
    return f"and on ({MODEL}) sum by ({MODEL}) (increase({selector}[{FEW_WITHIN}])) >= {number}"


GROUP = "squadron"
WIDTH = 110


def rules_text(head: str, ttft: str, scope: Scope = EVERYTHING) -> str:
    """Return the YAML of a file of rules. head: its first line, a comment. ttft: as of `alerts`."""
    rules = [_rule(alert, scope.labels) for alert in alerts(ttft, scope)]
    groups = {"groups": [{"name": GROUP, "rules": rules}]}
    return f"# {head}\n" + yaml.safe_dump(groups, sort_keys=False, width=WIDTH)


def _rule(alert: Alert, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasting,
        "labels": {"severity": alert.severity, **labels},
        "annotations": {"summary": alert.summary, "description": alert.description},
    }
