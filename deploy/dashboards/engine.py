"""The dashboard `Squadron: engine`: what replicas and their ranks do with each step, block and second."""

from __future__ import annotations

from deploy.dashboards.panel import Dashboard, Panel, Query, Row
from deploy.dashboards.promql import Chosen
from deploy.dashboards.variables import CHOOSE_CLUSTER, CHOOSE_MODEL, CHOOSE_REPLICA

CHOSEN = Chosen(by_replica=True)
TOKENS = "suffix: tokens/s"
RANK = "replica, rank"


def _spread(title: str, name: str, unit: str, text: str, top: float | None = None) -> Panel:
    """Mean and tail of what was observed at each step, by replica."""
    queries = (
        Query(CHOSEN.mean(name), "mean {{replica}}"),
        Query(CHOSEN.percentile(0.95, name, "replica"), "p95 {{replica}}"),
    )
    return Panel(title, unit, text, queries, top=top)


def _phase(title: str, name: str, text: str) -> Panel:
    return Panel(title, "s", text, _percentiles(name))


def _percentiles(name: str) -> tuple[Query, ...]:
    shares = (0.5, 0.95)
    return tuple(Query(CHOSEN.percentile(share, name), f"p{share * 100:g} {{{{model_name}}}}") for share in shares)


def _share(hits: str, of: str) -> str:
    """Share of tokens. Without any that were looked up there is none to show."""
    return f"{CHOSEN.rate(hits)} / ({CHOSEN.rate(of)} > 0)"


def _costs(title: str, name: str, what: str) -> Panel:
    text = f"{what} that were used, by tenant, and that nobody used: together all there were."
    queries = (
        Query(CHOSEN.rate(f"tenant_{name}", "tenant"), "{{tenant}}"),
        Query(CHOSEN.rate(f"idle_{name}", ""), "idle"),
    )
    return Panel(title, "none", text, queries, stacked=True)


STEPS = Row(
    "Steps",
    (
        _spread("Batch size", "step_batch_size", "none", "Sequences that run while a step does, of --max-num-seqs."),
        _spread(
            "Tokens of a step",
            "iteration_tokens_total",
            "none",
            "Tokens that a step computes, prompts and decode together, of --max-num-batched-tokens.",
        ),
        _spread(
            "Token budget used",
            "step_budget_used_ratio",
            "percentunit",
            "Share of the budget of a step that is used. At 1 prompts wait for steps: time to first token grows.",
            top=1.0,
        ),
        Panel(
            "Tokens of replicas",
            TOKENS,
            "Prompt tokens computed or found, and tokens generated, by replica.",
            (
                Query(CHOSEN.rate("engine_prompt_tokens", "replica"), "in {{replica}}"),
                Query(CHOSEN.rate("engine_generation_tokens", "replica"), "out {{replica}}"),
            ),
        ),
    ),
)
TIME = Row(
    "Time of a step",
    (
        Panel(
            "Where a step's time goes",
            "s",
            "Means over all chosen replicas: forward and sampling on rank 0; schedule, prepare and update on the "
            "host; telling the other ranks.",
            (
                Query(CHOSEN.mean("step_device_seconds", "model_name"), "device {{model_name}}"),
                Query(CHOSEN.mean("step_host_seconds", "model_name"), "host {{model_name}}"),
                Query(CHOSEN.mean("step_channel_seconds", "model_name"), "channel {{model_name}}"),
            ),
            stacked=True,
        ),
        _spread("Whole step", "step_seconds", "s", "Host, channel and device together."),
        _spread("Host", "step_host_seconds", "s", "Schedule, prepare and update. Above a tenth of a step: too much."),
        _spread("Channel", "step_channel_seconds", "s", "Telling the other ranks of a step."),
    ),
)
RANKS = Row(
    "Ranks",
    (
        Panel(
            "Forward of each rank",
            "s",
            "A rank's part of a step; on rank 0 with sampling. One that is slower than the others holds up all.",
            (Query(CHOSEN.mean("rank_forward_seconds", RANK), "{{replica}} rank {{rank}}"),),
        ),
        Panel(
            "Wait of each rank",
            "s",
            "What a rank waits for its next step, idle time too: under load, what the host takes between two steps.",
            (Query(CHOSEN.mean("rank_channel_wait_seconds", RANK), "{{replica}} rank {{rank}}"),),
        ),
        Panel(
            "Memory of each rank",
            "bytes",
            "Memory of the process (host), and of its GPU (device).",
            (Query(CHOSEN.most("rank_memory_bytes", f"{RANK}, kind"), "{{kind}} {{replica}} rank {{rank}}"),),
        ),
    ),
)
CACHE = Row(
    "KV cache",
    (
        Panel(
            "KV blocks by state",
            "none",
            "Blocks held by live sequences, cached (only the prefix cache knows them; free to take) and free.",
            (Query(CHOSEN.total("kv_blocks", "state"), "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "KV cache held",
            "percentunit",
            "Share of the blocks that live sequences hold. Near 1 with preemptions: fewer sequences, or more memory.",
            (Query(CHOSEN.most("kv_cache_usage_perc", "replica"), "{{replica}}"),),
            warn=0.95,
            top=1.0,
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            "Share of prompt tokens found in the prefix cache: of all that replicas looked up, and of those that "
            "routers expected there.",
            (
                Query(_share("prefix_cache_hits", "prefix_cache_queries"), "found {{model_name}}"),
                Query(
                    _share("router_actual_cached_tokens", "router_predicted_cached_tokens"),
                    "found of expected {{model_name}}",
                ),
            ),
        ),
        Panel(
            "Cached tokens, expected and found",
            TOKENS,
            "Prompt tokens that routers expected in the prefix cache of the replica they chose, and those that were "
            "there. Far apart: the router's index lags behind.",
            (
                Query(CHOSEN.rate("router_predicted_cached_tokens"), "expected {{model_name}}"),
                Query(CHOSEN.rate("router_actual_cached_tokens"), "found {{model_name}}"),
            ),
        ),
    ),
)
QUEUE = Row(
    "Queue of the replicas",
    (
        Panel(
            "Sequences",
            "none",
            "Sequences in the running batch, and those that wait to run.",
            (
                Query(CHOSEN.total("num_requests_running", "replica"), "running {{replica}}"),
                Query(CHOSEN.total("num_requests_waiting", "replica"), "waiting {{replica}}"),
            ),
        ),
        Panel(
            "Queue age",
            "s",
            "How long the sequence has waited that waits longest.",
            (Query(CHOSEN.most("replica_queue_age_seconds", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Prompt tokens to compute",
            "none",
            "Prompt tokens of waiting and running sequences still to be computed.",
            (Query(CHOSEN.total("outstanding_prompt_tokens", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Preemptions",
            "none",
            "Sequences put back to be computed again since blocks ran out, from one point to the next.",
            (Query(CHOSEN.growth("num_preemptions", "replica"), "{{replica}}"),),
            warn=1.0,
        ),
    ),
)
PHASES = Row(
    "Phases of a choice",
    (
        Panel(
            "Queued",
            "s",
            "From its arrival at the replica to its start; for structured output the compiling of its grammar, too.",
            (
                *_percentiles("request_queue_time_seconds"),
                Query(CHOSEN.percentile(0.95, "request_grammar_time_seconds"), "grammar, p95 {{model_name}}"),
            ),
        ),
        _phase("Prefill", "request_prefill_time_seconds", "From its start to its first token."),
        _phase("Decode", "request_decode_time_seconds", "From its first token to its last."),
        Panel(
            "Ends",
            "reqps",
            "Choices that ended in replicas, by reason, or the code of an error.",
            (Query(CHOSEN.rate("engine_choices_ended", "reason"), "{{reason}}"),),
            stacked=True,
        ),
    ),
)
SURVIVAL = Row(
    "Survival",
    (
        Panel(
            "Requests resumed",
            "none",
            "Requests that came with tokens from another replica, from one point to the next.",
            (Query(CHOSEN.growth("engine_requests_resumed", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Submits refused",
            "none",
            "Requests that routers sent and that were not taken, by code.",
            (Query(CHOSEN.growth("submits_refused", "replica, code"), "{{code}} {{replica}}"),),
            stacked=True,
        ),
        Panel(
            "Rows dropped",
            "none",
            "Tokens that nobody wanted any more, in replicas; rows of former attempts and out of place, in routers. "
            "Out of place: a fault of ours.",
            (
                Query(CHOSEN.growth("rows_unwanted", "replica"), "unwanted {{replica}}"),
                Query(CHOSEN.growth("stale_rows"), "stale {{model_name}}"),
                Query(CHOSEN.growth("misplaced_rows"), "out of place {{model_name}}"),
            ),
        ),
    ),
)
COSTS = Row(
    "Who uses it",
    (
        _costs("Devices", "device_seconds", "Devices"),
        _costs("KV blocks", "kv_block_seconds", "KV blocks"),
        Panel(
            "Idle share",
            "percentunit",
            "Share of the devices' time that nobody used.",
            (Query(_share("idle_device_seconds", "device_seconds"), "{{model_name}}"),),
            top=1.0,
        ),
        Panel(
            "Device seconds of a request",
            "s",
            "What a completed request used.",
            tuple(
                Query(CHOSEN.percentile(share, "request_device_seconds"), f"p{share * 100:g} {{{{model_name}}}}")
                for share in (0.5, 0.95)
            ),
        ),
    ),
)
ENGINE = Dashboard(
    "squadron-engine",
    "Squadron: engine",
    "What Squadron's replicas do: steps, time, ranks, KV cache, queue, survival, and who uses them.",
    (CHOOSE_CLUSTER, CHOOSE_MODEL, CHOOSE_REPLICA),
    (STEPS, TIME, RANKS, CACHE, QUEUE, PHASES, SURVIVAL, COSTS),
)
