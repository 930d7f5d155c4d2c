"""Every family of figures that Squadron shows to Prometheus: one table, for code, docs, tests and dashboards.

Names, types and buckets are vLLM's (V1) where it has the same figure: `squadron_` takes the place of `vllm:`. A
family has all of vLLM's buckets and sometimes finer ones below them; its alias has exactly vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.telemetry.buckets import (
    BLOCK_SECONDS,
    CHOICES,
    COUNTS,
    FINE,
    FINE_WHOLE,
    FIRST_TOKEN,
    PER_TOKEN,
    SEQUENCES,
    SHARES,
    STEP_SECONDS,
    STEP_TOKENS,
    USED_SECONDS,
    WHOLE,
    Buckets,
)

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

    ROUTER: each router, of its own requests; at its `/metrics`. TOLD: replicas, which tell routers; at `/metrics` of
    each router, too. REPLICA / RANK: each replica, and each rank of it; through Ray alone.
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
        """Labels that publishing through Ray adds, by which the processes that measure it are told apart."""
        own = {Source.ROUTER: ("router",), Source.RANK: ("replica", "rank")}.get(self.source, ("replica",))
        return tuple(label for label in own if label not in self.extra_labels)

    @property
    def ray_labels(self) -> tuple[str, ...]:
        """All labels that it has through Ray, beside Ray's own."""
        return (*self.labels, *self.own_labels)

    @property
    def at_routers(self) -> bool:
        """Whether a router's `/metrics` shows it."""
        return self.source in (Source.ROUTER, Source.TOLD)


def _counter(name: str, source: Source, text: str, *labels: str, vllm: bool = False) -> Family:
    return Family(name, Kind.COUNTER, source, text, labels, vllm=name if vllm else "")


def _gauge(name: str, source: Source, text: str, *labels: str, vllm: bool = False) -> Family:
    return Family(name, Kind.GAUGE, source, text, labels, vllm=name if vllm else "")


def _histogram(
    name: str, source: Source, text: str, buckets: Buckets, finer: Buckets = (), vllm: bool = False
) -> Family:
    return Family(name, Kind.HISTOGRAM, source, text, (), (*finer, *buckets), len(finer), name if vllm else "")


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
    _counter("requests_accepted", _R, "Requests that were taken in."),
    _counter("requests_ended", _R, "Requests that ended: completed, aborted, or the error's code.", "outcome"),
    _counter("migrations", _R, "Requests moved to another replica."),
    _counter("links_lost", _R, "Links to replicas that ended, by reason.", "reason"),
    _counter("stale_rows", _R, "Rows and reports of former attempts and lives, dropped."),
    _counter("misplaced_rows", _R, "Tokens that were not the next one, dropped."),
    _gauge("replicas", _R, "Replicas that the router has links to, by state: ready, not_ready.", "state"),
    _gauge("replica_failed_starts", _R, "Starts of replicas that failed in a row before those that go on now."),
    _histogram("request_device_seconds", _R, "Device seconds of a completed request.", USED_SECONDS),
    _histogram("request_kv_block_seconds", _R, "KV block seconds of a completed request.", BLOCK_SECONDS),
    # ---- routing: what was expected in prefix caches, and what was there
    _counter(
        "router_predicted_cached_tokens",
        _R,
        "Prompt tokens that the router expected in the prefix cache of the replica it chose.",
    ),
    _counter("router_actual_cached_tokens", _R, "Prompt tokens that were in it, of the same requests."),
    _counter("router_resyncs", _R, "Times that a replica had to tell its prefix cache anew."),
    _gauge("router_index_blocks", _R, "KV blocks in the router's index."),
    # ---- admission and tenants
    _gauge("sequences_dispatched", _R, "Sequences past the fair gate."),
    _gauge("tokens_dispatched", _R, "Tokens of prompts and expected output past the fair gate."),
    _gauge("queued_tokens", _R, "Tokens of prompts and expected output that wait at it."),
    _gauge("queue_age_seconds", _R, "Seconds that the first request at it has waited."),
    _gauge("queue_drain_tokens_per_second", _R, "Rate at which the queue drains; 0 = not known."),
    _counter("tenant_requests", _R, "Requests by tenant and what the door said.", "tenant", "outcome"),
    _counter("tenant_prompt_tokens", _R, "Prompt tokens charged.", "tenant"),
    _counter("tenant_generation_tokens", _R, "Tokens generated.", "tenant"),
    _gauge("tenant_requests_queued", _R, "Requests that wait for their tenant's turn.", "tenant"),
    _counter("tenant_requests_shed", _R, "Requests let in, then refused: too many waited, or too long.", "tenant"),
    # ---- replicas: the engine's state, told to routers
    _gauge("num_requests_running", _T, "Sequences in the running batch.", "replica", vllm=True),
    _gauge("num_requests_waiting", _T, "Sequences that wait to run.", "replica", vllm=True),
    _gauge("kv_cache_usage_perc", _T, "Share of the KV blocks in use, 1 = all.", "replica", vllm=True),
    _gauge(
        "kv_blocks",
        _T,
        "KV blocks, by state: free (hold nothing), cached (only the prefix cache knows them), held (in use).",
        "replica",
        "state",
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
        "Seconds of the replica's compiler of grammars that a tenant used.",
        "replica",
        "tenant",
    ),
    # ---- replicas: phases of a choice that drew a token; queue + prefill + decode = its time in the replica
    _histogram(
        "request_queue_time_seconds", _P, "From a choice's arrival to its start.", WHOLE, FINE_WHOLE, vllm=True
    ),
    _histogram(
        "request_prefill_time_seconds", _P, "From its start to its first token.", WHOLE, FINE_WHOLE, vllm=True
    ),
    _histogram("request_decode_time_seconds", _P, "From its first token to its last.", WHOLE, FINE_WHOLE, vllm=True),
    _histogram(
        "request_inference_time_seconds", _P, "From its start to its last token.", WHOLE, FINE_WHOLE, vllm=True
    ),
    _histogram(
        "request_grammar_time_seconds",
        _P,
        "From the arrival of a request with structured output to its compiled grammar: part of its queue time.",
        WHOLE,
        FINE_WHOLE,
    ),
    # ---- replicas: one observation for each step of the engine
    _histogram("iteration_tokens_total", _P, "Tokens computed by a step.", STEP_TOKENS, vllm=True),
    _histogram("step_batch_size", _P, "Sequences that run while a step does.", SEQUENCES),
    _histogram("step_budget_used_ratio", _P, "Share of the token budget that a step uses, 1 = all.", SHARES),
    _histogram("step_seconds", _P, "A whole step: host, channel and device.", STEP_SECONDS),
    _histogram("step_host_seconds", _P, "Host time of a step: schedule, prepare, update.", STEP_SECONDS),
    _histogram("step_device_seconds", _P, "Forward and sampling of a step, on rank 0.", STEP_SECONDS),
    _histogram("step_channel_seconds", _P, "Telling the other ranks of a step.", STEP_SECONDS),
    # ---- replicas: queue, drops, migrations
    _gauge("replica_queue_age_seconds", _P, "Seconds that the sequence which waits longest has waited."),
    _counter("engine_choices_ended", _P, "Choices that ended, by reason, or the code of an error.", "reason"),
    _counter("engine_requests_resumed", _P, "Requests that go on here after they ran elsewhere."),
    _counter("submits_refused", _P, "Requests that routers sent and that were not taken, by code.", "code"),
    _counter("rows_unwanted", _P, "Tokens that were dropped since nobody wants them any more."),
    # ---- ranks
    _histogram("rank_forward_seconds", _K, "A rank's part of a step; on rank 0 with sampling.", STEP_SECONDS),
    _histogram("rank_channel_wait_seconds", _K, "Wait of a rank for its next step, idle time too.", STEP_SECONDS),
    _gauge("rank_memory_bytes", _K, "Memory of a rank's process (host), and on its GPU (device).", "kind"),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in TABLE}
