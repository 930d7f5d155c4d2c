"""All alerts. Their expressions are of figures that Ray publishes: ours, and those of Serve's controller."""

from __future__ import annotations

from cluster.router.metrics import FAULTS
from cluster.wire.link import CLOSED, DRAINED, ENDS, PEER_ALIVE
from deploy.alerts.alert import Alert
from deploy.alerts.scope import EVERYTHING, Scope
from deploy.dashboards.promql import CLUSTER, SERVE_HEALTHY, SERVE_STATUS, SERVE_WANTED, metric

TTFT_SECONDS = 2.0  # target of the time to the first token; the chart has a value for it
FEW = 5  # requests within FEW_WITHIN: fewer that fail, move or come late are no share to wake anybody for
FEW_TOKENS = 20  # first tokens within FEW_WITHIN: of fewer the 95th percentile is that of the slowest alone
FEW_WITHIN = "15m"
TTFT_MARK = "TTFT_TARGET_SECONDS"  # stands for it where the chart puts its value
MODEL = f"{CLUSTER}, model_name"
REPLICA = f"{MODEL}, replica"
DEPLOYMENT = f"{CLUSTER}, deployment"
REPLICAS = 'deployment=~"Replica.*"'
DEPLOYMENTS = 'deployment=~"Router|Batches|Replica.*"'  # others on the same Ray are none of ours
OF_MODEL = "{{ $labels.model_name }}"
ERRORS = "|".join(FAULTS)  # a deadline is the client's, and has an alert of its own
UNSERVED = "no_replica|replica_lost"  # what clients are told where no replica is ready, or comes in time
DEATHS = "|".join(code for code in ENDS if code not in PEER_ALIVE)  # why a link ends with its replica
PLANNED = f"{CLOSED}|{DRAINED}"  # why links end at an update or a scale-down


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
            "No router of Squadron tells any figures",
            "Either nothing runs, or Prometheus does not reach Ray's metrics. Next: `kubectl get rayservice` and "
            "`squadron status --address URL`; where that is ready, look at the PodMonitor and at "
            "networkPolicy.monitoring.",
        ),
        Alert(
            "SquadronNoReadyReplica",
            f"max by ({MODEL}) ({ready}) == 0 and on ({MODEL}) sum by ({MODEL}) (increase({unserved}[5m])) > 0",
            "1m",
            "critical",
            f"Requests for {OF_MODEL} get 503, and no replica is ready",
            "A model that was scaled to zero and is on its way is quiet until clients have waited in vain "
            "(cold_start_timeout). Next: `squadron status` says for each replica what "
            "keeps it from serving, `squadron doctor` on its node what to mend there.",
        ),
    )


def _of_copies(scope: Scope) -> tuple[Alert, ...]:
    """What Serve wants, less what passes its checks.

    Where it tells of no replica that passes, that is none. Of routers it is no loss, but an installation whose pods
    are being pulled: of those that had passed and are gone it tells 0.
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
            "The others carry their load. Next: `squadron status`: pending ones wait for room (pods, GPUs), starting "
            "ones for weights, crash-looping ones say why.",
        ),
        Alert(
            "SquadronRouterLost",
            f"sum by ({CLUSTER}) ({wanted}) - sum by ({CLUSTER}) ({healthy}) > 0",
            "2m",
            "critical",
            "{{ $value }} routers are missing",
            "Streams of a router that dies end with the error router_lost, and nobody has replaced it. Next: "
            "`squadron status`, then the log of Serve's controller on the head (`kubectl logs`).",
        ),
        Alert(
            "SquadronDeploymentFailed",
            f"{status} > 0 and {status} <= 2",
            "5m",
            "critical",
            "Ray Serve gives up on {{ $labels.deployment }}",
            "An update failed and the version before it serves, or copies fail their checks again and again. Next: "
            "`squadron status` gives the reason; then mend the settings, or `squadron doctor` on the node.",
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
            # Minutes in which some died: those that a node takes along count once.
            f"max by ({MODEL}) (changes(sum by ({MODEL}, router) ({died})[15m:1m])) > 3 "
            f"or max by ({MODEL}) ({failed_starts}) > 2",
            "0m",
            "critical",
            f"Replicas of {OF_MODEL} die again and again, {{{{ $value }}}} times by now",
            "Some died in more than three of the last 15 minutes, or more than two starts in a row failed. Streams "
            "go on elsewhere as long as one is left. Next: `squadron status` says why the last start failed, "
            "`squadron doctor` on the node what is wrong there (memory, GPUs, disks).",
        ),
        Alert(
            "SquadronMigrationStorm",
            f"sum by ({MODEL}) (rate({moved}[10m])) / (sum by ({MODEL}) (rate({accepted}[10m])) > 0) > 0.1 "
            f"and on ({MODEL}) sum by ({MODEL}) (increase({unplanned}[10m])) > 0 {_at_least(FEW, moved)}",
            "5m",
            "warning",
            f"{{{{ $value | humanizePercentage }}}} of the requests for {OF_MODEL} move to another replica",
            f"Replicas are lost; an update or a scale-down alone is quiet, and so are fewer than {FEW} requests "
            f"within {FEW_WITHIN}. Clients see pauses, and what was computed is computed again. Next: "
            "`squadron status` (do replicas die, or stall?), and `squadron why ID` for one of the requests.",
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
            f"At least {FEW} of them within {FEW_WITHIN}. The panel `Requests by outcome` has the codes. Next: "
            "`squadron status`, and `squadron why ID` with the id of an answer that failed.",
        ),
        Alert(
            "SquadronSlowFirstToken",
            f"histogram_quantile(0.95, sum by (le, {MODEL}) (rate({first_tokens}[5m]))) > {ttft} "
            f"{_at_least(FEW_TOKENS, counted)}",
            "5m",
            "warning",
            f"First tokens of {OF_MODEL} take {{{{ $value | humanizeDuration }}}} (p95)",
            f"More than the target of {ttft} s, of at least {FEW_TOKENS} first tokens within {FEW_WITHIN}. Next: "
            "`squadron why ID` tells of one request what it waited for; `squadron top` shows whether requests queue. "
            "`squadron plan` says how many replicas a load needs.",
        ),
        Alert(
            "SquadronQueueOld",
            f"max by ({MODEL}) ({scope.of(metric('queue_age_seconds'))}) > 30",
            "5m",
            "warning",
            f"A request for {OF_MODEL} has waited {{{{ $value | humanizeDuration }}}} for its turn",
            "More comes than the replicas do; soon requests are refused with 429. Next: `squadron top` shows whose "
            "they are; give the tenant a quota, or the model more replicas (max_replicas).",
        ),
        Alert(
            "SquadronDeadlineMisses",
            f"sum by ({MODEL}) (rate({late}[5m])) / {per_model} > 0.05 {_at_least(FEW, late)}",
            "5m",
            "warning",
            f"{{{{ $value | humanizePercentage }}}} of the requests for {OF_MODEL} miss their deadline",
            f"At least {FEW} of them within {FEW_WITHIN}. Clients give less time than answers take. Next: "
            "`squadron why ID` says of one whether it waited, or ran.",
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
            "What is preempted is computed again. Next: `squadron top` (KV cache, preempted), `squadron plan` for "
            "the tokens that fit; lower --max-num-seqs or --max-model-len, or add replicas.",
        ),
        Alert(
            "SquadronMisplacedTokens",
            f"sum by ({MODEL}) (increase({scope.of(metric('misplaced_rows'))}[15m])) > 0",
            "0m",
            "warning",
            f"Replicas of {OF_MODEL} sent tokens that were not the next one",
            "They were dropped and the requests moved, so clients have exact answers; but it is a fault of Squadron. "
            "Next: `squadron why ID`, and report it with the replica's log.",
        ),
    )


def _at_least(number: int, selector: str) -> str:
    """Return what an expression of a share ends with: of so few events it says nothing."""
    return f"and on ({MODEL}) sum by ({MODEL}) (increase({selector}[{FEW_WITHIN}])) >= {number}"
