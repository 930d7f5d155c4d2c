"""The dashboard `Squadron: engine`: what replicas and their ranks do with each step, block and second."""

from __future__ import annotations

from deploy.observability.grafana import Dashboard, Panel, Query, Row
from deploy.observability.promql import CHOOSE_CLUSTER, CHOOSE_MODEL, CHOOSE_REPLICA, Chosen

CHOSEN = Chosen(by_replica=True)
TOKENS = "suffix: tokens/s"
RANK = "replica, rank"


def _spread(title: str, name: str, unit: str, text: str, top: float | None = None) -> Panel:
    """Mean and 95th percentile over steps, by replica."""
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
    """Share of tokens; no value while none are looked up."""
    return f"{CHOSEN.rate(hits)} / ({CHOSEN.rate(of)} > 0)"


def _costs(title: str, name: str, what: str) -> Panel:
    text = f"{what} in use, by tenant, and idle; together they are all there are."
    queries = (
        Query(CHOSEN.rate(f"tenant_{name}", "tenant"), "{{tenant}}"),
        Query(CHOSEN.rate(f"idle_{name}", ""), "idle"),
    )
    return Panel(title, "none", text, queries, stacked=True)


STEPS = Row(
    "Steps",
    (
        _spread("Batch size", "step_batch_size", "none", "Sequences in a step, at most --max-num-seqs."),
        _spread(
            "Tokens of a step",
            "iteration_tokens_total",
            "none",
            "Tokens that a step computes, prefill and decode together, at most --max-num-batched-tokens.",
        ),
        _spread(
            "Token budget used",
            "step_budget_used_ratio",
            "percentunit",
            "Used share of a step's token budget. At 1, prompts wait for later steps and time to first token grows.",
            top=1.0,
        ),
        Panel(
            "Tokens of replicas",
            TOKENS,
            "Prompt tokens computed or found in the cache, and tokens generated, by replica.",
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
            "Means over the chosen replicas: forward and sampling on rank 0 (device); schedule, prepare and update "
            "(host); sending the step to the other ranks (channel).",
            (
                Query(CHOSEN.mean("step_device_seconds", "model_name"), "device {{model_name}}"),
                Query(CHOSEN.mean("step_host_seconds", "model_name"), "host {{model_name}}"),
                Query(CHOSEN.mean("step_channel_seconds", "model_name"), "channel {{model_name}}"),
            ),
            stacked=True,
        ),
        _spread("Whole step", "step_seconds", "s", "Host, channel and device together."),
        _spread("Host", "step_host_seconds", "s", "Schedule, prepare and update: less than a tenth of a step."),
        _spread("Channel", "step_channel_seconds", "s", "Sending a step to the other ranks."),
    ),
)
RANKS = Row(
    "Ranks",
    (
        Panel(
            "Forward of each rank",
            "s",
            "A rank's part of a step, with sampling on rank 0. All ranks wait for the slowest.",
            (Query(CHOSEN.mean("rank_forward_seconds", RANK), "{{replica}} rank {{rank}}"),),
        ),
        Panel(
            "Wait of each rank",
            "s",
            "How long a rank waits for its next step, including idle time. Under load, this is the host's share.",
            (Query(CHOSEN.mean("rank_channel_wait_seconds", RANK), "{{replica}} rank {{rank}}"),),
        ),
        Panel(
            "Memory of each rank",
            "bytes",
            "Memory of the process (host) and of its GPU (device).",
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
            "Blocks held by live sequences, cached (only the prefix cache uses them; they can be reused) and free.",
            (Query(CHOSEN.total("kv_blocks", "state"), "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "KV cache held",
            "percentunit",
            "Share of blocks that live sequences hold. If near 1 with preemptions: fewer sequences, or more memory.",
            (Query(CHOSEN.most("kv_cache_usage_perc", "replica"), "{{replica}}"),),
            warn=0.95,
            top=1.0,
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            "Share of prompt tokens found in the prefix cache, among all that replicas looked up, and among those "
            "that routers expected.",
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
            "Prompt tokens that routers expected in the prefix cache of the chosen replica, and those found. If they "
            "differ much, the router's index lags behind.",
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
            "Sequences that run, and sequences that wait to run.",
            (
                Query(CHOSEN.total("num_requests_running", "replica"), "running {{replica}}"),
                Query(CHOSEN.total("num_requests_waiting", "replica"), "waiting {{replica}}"),
            ),
        ),
        Panel(
            "Queue age",
            "s",
            "Wait of the oldest waiting sequence.",
            (Query(CHOSEN.most("replica_queue_age_seconds", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Prompt tokens to compute",
            "none",
            "Prompt tokens of waiting and running sequences that are not computed yet.",
            (Query(CHOSEN.total("outstanding_prompt_tokens", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Preemptions",
            "none",
            "Sequences preempted because blocks ran out, since the previous point. They are computed again.",
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
            "From arrival at the replica to the start; for structured output this includes compiling the grammar.",
            (
                *_percentiles("request_queue_time_seconds"),
                Query(CHOSEN.percentile(0.95, "request_grammar_time_seconds"), "grammar, p95 {{model_name}}"),
            ),
        ),
        _phase("Prefill", "request_prefill_time_seconds", "From the start to the first token."),
        _phase("Decode", "request_decode_time_seconds", "From the first token to the last."),
        Panel(
            "Ends",
            "reqps",
            "Choices that ended, by finish reason or error code.",
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
            "Requests that arrived with tokens of another replica, since the previous point.",
            (Query(CHOSEN.growth("engine_requests_resumed", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Submits refused",
            "none",
            "Requests from routers that the replica refused, by code.",
            (Query(CHOSEN.growth("submits_refused", "replica, code"), "{{code}} {{replica}}"),),
            stacked=True,
        ),
        Panel(
            "Rows dropped",
            "none",
            "In replicas, tokens of requests that had ended; in routers, tokens of earlier attempts (stale) and "
            "tokens that were not the next one (out of place). Out of place is a bug in Squadron.",
            (
                Query(CHOSEN.growth("rows_unwanted", "replica"), "unwanted {{replica}}"),
                Query(CHOSEN.growth("stale_rows"), "stale {{model_name}}"),
                Query(CHOSEN.growth("misplaced_rows"), "out of place {{model_name}}"),
            ),
        ),
    ),
)
COSTS = Row(
    "Usage by tenant",
    (
        _costs("Devices", "device_seconds", "Devices"),
        _costs("KV blocks", "kv_block_seconds", "KV blocks"),
        Panel(
            "Idle share",
            "percentunit",
            "Share of device time that no request used.",
            (Query(_share("idle_device_seconds", "device_seconds"), "{{model_name}}"),),
            top=1.0,
        ),
        Panel(
            "Device seconds of a request",
            "s",
            "Device time that a completed request used.",
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
    "What Squadron's replicas do: steps, time, ranks, KV cache, queue, survival, usage by tenant.",
    (CHOOSE_CLUSTER, CHOOSE_MODEL, CHOOSE_REPLICA),
    (STEPS, TIME, RANKS, CACHE, QUEUE, PHASES, SURVIVAL, COSTS),
)
