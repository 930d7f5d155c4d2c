"""Every family of metrics that Squadron reports to Prometheus: one table for code, docs, tests and dashboards.

Names, types and buckets are vLLM's (V1) where it has the same metric: `squadron_` takes the place of `vllm:`. A
family has all of vLLM's buckets and sometimes finer ones below them; its alias has exactly vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

Buckets = tuple[float, ...]

# vLLM's (V1), in seconds.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
             80.0)  # fmt: skip
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
         1920.0, 7680.0)  # fmt: skip
# Below vLLM's least, for small models and for phases that take no time.
FINE = (0.001, 0.0025, 0.005)
FINE_WHOLE = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1)

# vLLM's as well; of tokens it has those up to the model's context.
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)

PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 768.0, 1024.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STEP_SECONDS = (2.5e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015,
                0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # fmt: skip
USED_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
BLOCK_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6)


PREFIX = "squadron_"
VLLM_METRICS = "vllm:"  # at `/metrics`
VLLM_RAY = "vllm_"  # through Ray, whose names have no colons
RAY_PREFIX = "ray_"  # what Ray puts before every name


class Kind(StrEnum):
    """The type of a family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """Who measures, and where it is shown. All are published through Ray, by the process that measures.

    ROUTER: each router, of its own requests; at its `/metrics`. TOLD: replicas, which report to routers; at the
    `/metrics` of each router, too. REPLICA / RANK: each replica, and each rank of it; through Ray alone.
    """

    ROUTER = "router"
    TOLD = "told"
    REPLICA = "replica"
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    name: without `squadron_`, and of a counter without `_total`. extra_labels: beside `model_name`.
    buckets: upper bounds of a histogram's, without +Inf. finer: how many of them, from the least, vLLM does not have.
    vllm: vLLM's name for it, as `name`, under which `--metrics-compat vllm` shows it as well; "" = it has none.
    """

    name: str
    kind: Kind
    source: Source
    text: str
    extra_labels: tuple[str, ...] = ()
    buckets: Buckets = ()
    finer: int = 0
    vllm: str = ""

    @property
    def full_name(self) -> str:
        """The name with `squadron_`, and of a counter without `_total`."""
        return PREFIX + self.name

    @property
    def shown_name(self) -> str:
        """The name as Prometheus has it: a counter's with `_total`; a histogram's is that of no series."""
        return self.full_name + ("_total" if self.kind is Kind.COUNTER else "")

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels that it has at `/metrics`."""
        return ("model_name", *self.extra_labels)

    @property
    def own_labels(self) -> tuple[str, ...]:
        """Labels that publishing through Ray adds, by which the processes that measure it are distinguished."""
        own = {Source.ROUTER: ("router",), Source.RANK: ("replica", "rank")}.get(self.source, ("replica",))
        return tuple(label for label in own if label not in self.extra_labels)

    @property
    def ray_labels(self) -> tuple[str, ...]:
        """All labels that it has through Ray, beside Ray's own."""
        return (*self.labels, *self.own_labels)


def _counter(name: str, source: Source, text: str, *labels: str, vllm: bool = False) -> Family:
    return Family(name, Kind.COUNTER, source, text, labels, vllm=name if vllm else "")


def _gauge(name: str, source: Source, text: str, *labels: str, vllm: bool = False) -> Family:
    return Family(name, Kind.GAUGE, source, text, labels, vllm=name if vllm else "")


def _histogram(
    name: str, source: Source, text: str, buckets: Buckets, finer: Buckets = (), vllm: bool = False
) -> Family:
    labels = ("replica",) if source is Source.TOLD else ()
    return Family(name, Kind.HISTOGRAM, source, text, labels, (*finer, *buckets), len(finer), name if vllm else "")


_R, _T, _P, _K = Source.ROUTER, Source.TOLD, Source.REPLICA, Source.RANK

TABLE: tuple[Family, ...] = (
    # ---- what clients see: measured in the router
    _histogram("time_to_first_token_seconds", _R, "From arrival to the first token.", FIRST_TOKEN, vllm=True),
    _histogram(
        "inter_token_latency_seconds", _R, "Between a choice's deliveries, per token.", PER_TOKEN, FINE, vllm=True
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        _R,
        "Mean over a choice's tokens after its first.",
        PER_TOKEN,
        FINE,
        vllm=True,
    ),
    _histogram("e2e_request_latency_seconds", _R, "From arrival to the last token.", WHOLE, FINE_WHOLE, vllm=True),
    _histogram("request_prompt_tokens", _R, "Prompt tokens of a request.", COUNTS, vllm=True),
    _histogram("request_generation_tokens", _R, "Tokens that a choice got.", COUNTS, vllm=True),
    _histogram("request_params_n", _R, "Choices that a request asks for.", CHOICES, vllm=True),
    _histogram("request_params_max_tokens", _R, "Output tokens that a choice may have.", COUNTS, vllm=True),
    _counter("prompt_tokens", _R, "Prompt tokens of requests that got a token.", vllm=True),
    _counter("generation_tokens", _R, "Tokens generated.", vllm=True),
    _counter("request_success", _R, "Choices that ended, by reason.", "finished_reason", vllm=True),
    _counter("http_responses", _R, "HTTP answers, by route and status.", "route", "status"),
    _counter("grpc_responses", _R, "gRPC answers, by method and status.", "method", "status"),
    # ---- requests and links of a router
    _gauge("router_start_time_seconds", _R, "When the router started, in seconds since 1970; no two have the same."),
    _gauge("requests_live", _R, "Requests that have not ended."),
    Family(
        "requests_queued",
        Kind.GAUGE,
        _R,
        "Requests that wait in the router: for their turn, or for a replica.",
        vllm="num_requests_waiting",  # in which all count that wait, since a vLLM has no queue but its engine's
    ),
    Family(
        "requests_queued_by_reason",
        Kind.GAUGE,
        _R,
        "Requests that wait in the router, by reason: capacity (their turn), deferred (a replica).",
        ("reason",),
        vllm="num_requests_waiting_by_reason",
    ),
    _counter("requests_accepted", _R, "Requests accepted."),
    _counter("requests_ended", _R, "Requests that ended: completed, aborted, or the error's code.", "outcome"),
    _counter("migrations", _R, "Requests moved to another replica."),
    _counter("links_lost", _R, "Links to replicas that ended, by reason.", "reason"),
    _counter("stale_rows", _R, "Dropped rows and reports of earlier attempts or incarnations."),
    _counter("misplaced_rows", _R, "Dropped tokens that were not the next one."),
    _gauge("replicas", _R, "Replicas that the router has links to, by state: ready, not_ready.", "state"),
    _gauge("replica_failed_starts", _R, "Failed starts of replicas in a row before the current ones."),
    _histogram("request_device_seconds", _R, "Device seconds of a completed request.", USED_SECONDS),
    _histogram("request_kv_block_seconds", _R, "KV block seconds of a completed request.", BLOCK_SECONDS),
    # ---- routing: what was expected in prefix caches, and what was there
    _counter(
        "router_predicted_cached_tokens",
        _R,
        "Prompt tokens that the router expected in the prefix cache of the replica it chose.",
    ),
    _counter("router_actual_cached_tokens", _R, "Prompt tokens that were in that cache, of the same requests."),
    _counter("router_resyncs", _R, "Full resyncs of a replica's prefix cache."),
    _gauge("router_index_blocks", _R, "KV blocks in the router's index."),
    # ---- admission and tenants
    _gauge("sequences_dispatched", _R, "Sequences given to the replicas."),
    _gauge("tokens_dispatched", _R, "Tokens of prompts and expected output given to the replicas."),
    _counter(
        "admission_rejections",
        _R,
        "Requests refused as too many wait (max_num_queued_reqs), or too long (longest_wait), by reason.",
        "reason",
        vllm=True,
    ),
    _gauge("queued_tokens", _R, "Tokens of prompts and expected output that wait in the router."),
    _gauge("queue_age_seconds", _R, "Seconds that the oldest waiting request has waited."),
    _gauge("queue_drain_tokens_per_second", _R, "Rate at which the queue drains; 0 = not known."),
    _counter("tenant_requests", _R, "Requests by tenant and result of admission.", "tenant", "outcome"),
    _counter("tenant_prompt_tokens", _R, "Prompt tokens charged.", "tenant"),
    _counter("tenant_generation_tokens", _R, "Tokens generated.", "tenant"),
    _gauge("tenant_requests_queued", _R, "Requests that wait for their tenant's turn.", "tenant"),
    _counter("tenant_requests_shed", _R, "Requests accepted, then refused: too many waited, or too long.", "tenant"),
    _counter("answers_unkept", _R, "Answers that their gateway had no room to keep: they end with their router."),
    # ---- kept answers: background and stored responses, and those with an Idempotency-Key
    _gauge("kept_answers", _R, "Answers that the router keeps, by state: running, ended.", "state"),
    _gauge("kept_answer_bytes", _R, "Bytes of the answers that the router keeps."),
    _counter("kept_answers_taken_over", _R, "Answers that the router took over from another one."),
    _counter("kept_answers_refused", _R, "Answers that were not begun, as there was no room to keep them."),
    _counter(
        "kept_answers_stopped",
        _R,
        "Answers that the router ended before they were complete, by the error's code.",
        "code",
    ),
    _counter(
        "kept_answers_dropped",
        _R,
        "Answers that are kept no more, by reason: expired, evicted (for others), deleted, superseded (by another "
        "router), refused.",
        "reason",
    ),
    _counter("answer_replays", _R, "Answers of other routers that the router gave out."),
    _gauge("answer_replays_running", _R, "Answers of other routers that the router gives out now."),
    _gauge("answer_replay_bytes", _R, "Bytes of the answers of other routers that the router gives out now."),
    _counter("answer_replays_refused", _R, "Answers of other routers that were not given out, or not to their end."),
    # ---- replicas: the engine's state, reported to routers
    _gauge("num_requests_running", _T, "Sequences in the running batch.", "replica", vllm=True),
    _gauge("num_requests_waiting", _T, "Sequences that wait to run.", "replica", vllm=True),
    _gauge(
        "num_requests_waiting_by_reason",
        _T,
        "Sequences that wait to run, by reason: capacity (blocks, or a place in the batch).",
        "replica",
        "reason",
        vllm=True,
    ),
    _gauge(
        "cache_config_info",
        _T,
        "1: the size of a KV block in tokens, and how many there are.",
        "replica",
        "block_size",
        "num_gpu_blocks",
        vllm=True,
    ),
    _gauge("kv_cache_usage_perc", _T, "Share of the KV blocks in use, 1 = all.", "replica", vllm=True),
    _gauge(
        "kv_blocks",
        _T,
        "KV blocks, by state: free (hold nothing), cached (only the prefix cache knows them), held (in use).",
        "replica",
        "state",
    ),
    _gauge(
        "engine_sleep_state",
        _T,
        "1 for the state that the replica is in: awake, weights_offloaded (level 1 of sleep), discard_all (level 2).",
        "replica",
        "sleep_state",
        vllm=True,
    ),
    _gauge("outstanding_prompt_tokens", _T, "Prompt tokens still to compute.", "replica"),
    _counter("prefix_cache_queries", _T, "Prompt tokens looked up in the prefix cache.", "replica", vllm=True),
    _counter("prefix_cache_hits", _T, "Prompt tokens found in the prefix cache.", "replica", vllm=True),
    _counter("num_preemptions", _T, "Sequences preempted.", "replica", vllm=True),
    _counter("engine_prompt_tokens", _T, "Prompt tokens a replica computed or found.", "replica"),
    _counter("engine_generation_tokens", _T, "Tokens a replica generated.", "replica"),
    # ---- replicas: the cost ledger; idle + all tenants = all
    _counter("device_seconds", _T, "Seconds of the replica's devices, used or not.", "replica"),
    _counter("idle_device_seconds", _T, "Seconds of the replica's devices that nobody used.", "replica"),
    _counter(
        "tenant_device_seconds", _T, "Seconds of the replica's devices that a tenant used.", "replica", "tenant"
    ),
    _counter("kv_block_seconds", _T, "Seconds of the replica's KV blocks, used or not.", "replica"),
    _counter("idle_kv_block_seconds", _T, "Seconds of the replica's KV blocks that nobody used.", "replica"),
    _counter(
        "tenant_kv_block_seconds", _T, "Seconds of the replica's KV blocks that a tenant used.", "replica", "tenant"
    ),
    _counter(
        "tenant_grammar_seconds",
        _T,
        "Seconds of the replica's grammar compiler that a tenant used.",
        "replica",
        "tenant",
    ),
    # ---- replicas: phases of a choice that drew a token; queue + prefill + decode = its time in the replica
    _histogram(
        "request_queue_time_seconds", _T, "From a choice's arrival to its start.", WHOLE, FINE_WHOLE, vllm=True
    ),
    _histogram(
        "request_prefill_time_seconds", _T, "From its start to its first token.", WHOLE, FINE_WHOLE, vllm=True
    ),
    _histogram("request_decode_time_seconds", _T, "From its first token to its last.", WHOLE, FINE_WHOLE, vllm=True),
    _histogram(
        "request_inference_time_seconds", _T, "From its start to its last token.", WHOLE, FINE_WHOLE, vllm=True
    ),
    _histogram("request_num_preemptions", _T, "How often such a choice was preempted.", PREEMPTIONS, vllm=True),
    _histogram(
        "request_grammar_time_seconds",
        _P,
        "From the arrival of a request with structured output to its compiled grammar: part of its queue time.",
        WHOLE,
        FINE_WHOLE,
    ),
    # ---- replicas: one observation for each step of the engine
    _histogram("iteration_tokens_total", _T, "Tokens computed by a step.", STEP_TOKENS, vllm=True),
    _histogram("step_batch_size", _P, "Running sequences during a step.", SEQUENCES),
    _histogram("step_budget_used_ratio", _P, "Share of the token budget that a step uses, 1 = all.", SHARES),
    _histogram("step_seconds", _P, "A whole step: host, channel and device.", STEP_SECONDS),
    _histogram("step_host_seconds", _P, "Host time of a step: schedule, prepare, update.", STEP_SECONDS),
    _histogram("step_device_seconds", _P, "Forward and sampling of a step, on rank 0.", STEP_SECONDS),
    _histogram("step_channel_seconds", _P, "Broadcast of a step to the other ranks.", STEP_SECONDS),
    # ---- replicas: queue, drops, migrations
    _gauge("replica_queue_age_seconds", _P, "Seconds that the oldest waiting sequence has waited."),
    _counter("engine_choices_ended", _P, "Choices that ended, by reason, or the code of an error.", "reason"),
    _counter("engine_requests_resumed", _P, "Requests that continue here after they ran on another replica."),
    _counter("submits_refused", _P, "Requests from routers that were refused, by code.", "code"),
    _counter("rows_unwanted", _P, "Dropped tokens of requests that have ended."),
    # ---- ranks
    _histogram("rank_forward_seconds", _K, "A rank's part of a step; on rank 0 with sampling.", STEP_SECONDS),
    _histogram("rank_channel_wait_seconds", _K, "Wait of a rank for its next step, with idle time.", STEP_SECONDS),
    _gauge("rank_memory_bytes", _K, "Memory of a rank's process (host), and on its GPU (device).", "kind"),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in TABLE}
