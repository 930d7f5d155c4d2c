"""The dashboard `Squadron: service`: what clients see, who they are, and which replicas and routers serve them."""

from __future__ import annotations

from deploy.observability.grafana import Dashboard, Panel, Query, Row
from deploy.observability.promql import CHOOSE_CLUSTER, CHOOSE_MODEL, SERVE_HEALTHY, SERVE_WANTED, Chosen, serve

CHOSEN = Chosen(by_replica=False)
READY = 'state="ready"'
FAILED = 'outcome!~"completed|aborted"'
REPLICAS = "Replica.*"
TOKENS = "suffix: tokens/s"


def _latency(title: str, name: str, text: str, warn: float | None = None) -> Panel:
    queries = tuple(
        Query(CHOSEN.percentile(share, name), f"p{share * 100:g} {{{{model_name}}}}") for share in (0.5, 0.95, 0.99)
    )
    return Panel(title, "s", text, queries, warn=warn)


NOW = Row(
    "Now",
    (
        Panel(
            "Replicas ready",
            "none",
            "Replicas that are linked to routers and report steps. At 0, no request is served.",
            (Query(CHOSEN.reported_alike("replicas", "", READY), "ready"),),
            kind="stat",
        ),
        Panel(
            "Requests",
            "reqps",
            "Requests that ended, with any outcome.",
            (Query(CHOSEN.rate("requests_ended", ""), "requests"),),
            kind="stat",
        ),
        Panel(
            "Failed",
            "percentunit",
            "Share of requests that ended in an error. Requests that clients aborted do not count.",
            (
                Query(
                    f"({CHOSEN.rate('requests_ended', '', FAILED)} or vector(0)) / "
                    f"clamp_min({CHOSEN.rate('requests_ended', '')}, 1e-9)",
                    "failed",
                ),
            ),
            kind="stat",
            warn=0.01,
            alarm=0.05,
        ),
        Panel(
            "Time to first token, p95",
            "s",
            "From arrival at the router to the first token, for the slowest model.",
            (Query(f"max({CHOSEN.percentile(0.95, 'time_to_first_token_seconds')})", "p95"),),
            kind="stat",
            warn=1.0,
            alarm=2.0,
        ),
        Panel(
            "Tokens out",
            TOKENS,
            "Tokens sent to clients.",
            (Query(CHOSEN.rate("generation_tokens", ""), "tokens"),),
            kind="stat",
        ),
        Panel(
            "Migrations",
            "none",
            "Requests that continued on another replica after theirs was lost. Their clients saw a pause.",
            (Query(f"sum(increase({CHOSEN.series('migrations')}[$__range]))", "moved"),),
            kind="stat",
            warn=1.0,
        ),
    ),
)
TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests by outcome",
            "reqps",
            "Requests that ended: completed, aborted by the client, or the code of the error.",
            (Query(CHOSEN.rate("requests_ended", "model_name, outcome"), "{{model_name}} {{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Errors of HTTP and gRPC",
            "reqps",
            "Answers with a status of 400 and above, by route, and gRPC statuses other than OK.",
            (
                Query(CHOSEN.rate("http_responses", "route, status", 'status=~"[45].."'), "{{route}} {{status}}"),
                Query(CHOSEN.rate("grpc_responses", "method, status", 'status!="OK"'), "{{method}} {{status}}"),
            ),
            stacked=True,
        ),
        Panel(
            "Answers",
            "reqps",
            "All HTTP answers by route, and gRPC answers by method, including probes of /ready and scrapes.",
            (
                Query(CHOSEN.rate("http_responses", "route"), "{{route}}"),
                Query(CHOSEN.rate("grpc_responses", "method"), "gRPC {{method}}"),
            ),
            stacked=True,
        ),
        Panel(
            "Tokens",
            TOKENS,
            "Prompt tokens of requests that got a first token, and tokens generated.",
            (
                Query(CHOSEN.rate("prompt_tokens"), "in {{model_name}}"),
                Query(CHOSEN.rate("generation_tokens"), "out {{model_name}}"),
            ),
        ),
        Panel(
            "Requests under way",
            "none",
            "Admitted requests that have not ended, summed over all routers.",
            (Query(CHOSEN.total("requests_live"), "{{model_name}}"),),
        ),
        Panel(
            "Batch filler",
            TOKENS,
            "Tokens generated beyond those sent to clients: rows of batches, which use the capacity that clients "
            "leave.",
            (
                Query(
                    f"clamp_min({CHOSEN.rate('engine_generation_tokens')} - {CHOSEN.rate('generation_tokens')}, 0)",
                    "batches {{model_name}}",
                ),
            ),
        ),
    ),
)
LATENCY = Row(
    "Latency",
    (
        _latency(
            "Time to first token",
            "time_to_first_token_seconds",
            "From arrival at the router to the first token: queue, prefill and transport. If high with a long queue, "
            "add replicas; if high without, prompts are long or the prefix cache is cold.",
            warn=2.0,
        ),
        _latency(
            "Between tokens (ITL)",
            "inter_token_latency_seconds",
            "Between two deliveries to a client, per token. A high p99 with a low p50 means long prompts, or "
            "migrations.",
        ),
        _latency(
            "Per output token (TPOT)",
            "request_time_per_output_token_seconds",
            "Mean over the tokens of a choice after its first, recorded when the choice ends.",
        ),
        _latency("Whole request", "e2e_request_latency_seconds", "From arrival to the last token."),
    ),
)
ADMISSION = Row(
    "Queue and admission",
    (
        Panel(
            "Queue age",
            "s",
            "How long the oldest queued request has waited, in the worst router. It rises when requests arrive "
            "faster than replicas answer.",
            (Query(CHOSEN.most("queue_age_seconds"), "{{model_name}}"),),
            warn=10.0,
        ),
        Panel(
            "Tokens queued and sent",
            "none",
            "Tokens of prompts and expected output that are queued, and those that were sent to replicas.",
            (
                Query(CHOSEN.total("queued_tokens"), "queued {{model_name}}"),
                Query(CHOSEN.total("tokens_dispatched"), "sent {{model_name}}"),
            ),
        ),
        Panel(
            "Drain rate",
            TOKENS,
            "Rate at which the queue drains. Routers compute Retry-After from it; 0 = not known yet.",
            (Query(CHOSEN.total("queue_drain_tokens_per_second"), "{{model_name}}"),),
        ),
        Panel(
            "Requests refused",
            "reqps",
            "Requests refused, by code: a tenant's limit, an overloaded server, a bad request. The first two "
            "carry Retry-After.",
            (Query(CHOSEN.rate("tenant_requests", "outcome", 'outcome!="admitted"'), "{{outcome}}"),),
            stacked=True,
        ),
    ),
)
COPIES = Row(
    "Replicas and routers",
    (
        Panel(
            "Replicas",
            "none",
            "Replicas that are linked to routers, by state, and how many Serve wants and has. If fewer than wanted, "
            "`squadron status` says why. Several failed starts in a row are a crash loop.",
            (
                Query(CHOSEN.reported_alike("replicas", "model_name, state"), "{{model_name}} {{state}}"),
                Query(serve(SERVE_WANTED, REPLICAS), "wanted {{deployment}}"),
                Query(serve(SERVE_HEALTHY, REPLICAS), "healthy {{deployment}}"),
                Query(CHOSEN.most("replica_failed_starts"), "failed starts {{model_name}}"),
            ),
        ),
        Panel(
            "Routers",
            "none",
            "Routers that Serve wants, and those that pass its checks. Answers of a dead router wait for another.",
            (
                Query(serve(SERVE_WANTED, "Router"), "wanted"),
                Query(serve(SERVE_HEALTHY, "Router"), "healthy"),
            ),
        ),
        Panel(
            "Migrations",
            "none",
            "Requests moved to another replica since the previous point.",
            (Query(CHOSEN.growth("migrations"), "{{model_name}}"),),
        ),
        Panel(
            "Links lost",
            "none",
            "Links between routers and replicas that ended, by reason; closed and drained are normal.",
            (Query(CHOSEN.growth("links_lost", "model_name, reason"), "{{model_name}} {{reason}}"),),
            stacked=True,
        ),
    ),
)
TENANTS = Row(
    "Tenants",
    (
        Panel(
            "Requests by tenant",
            "reqps",
            "Requests admitted.",
            (Query(CHOSEN.rate("tenant_requests", "tenant", 'outcome="admitted"'), "{{tenant}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens by tenant",
            TOKENS,
            "Prompt tokens charged and tokens generated.",
            (
                Query(CHOSEN.rate("tenant_prompt_tokens", "tenant"), "in {{tenant}}"),
                Query(CHOSEN.rate("tenant_generation_tokens", "tenant"), "out {{tenant}}"),
            ),
            stacked=True,
        ),
        Panel(
            "Queued by tenant",
            "none",
            "Requests that wait in their tenant's queue.",
            (Query(CHOSEN.total("tenant_requests_queued", "tenant"), "{{tenant}}"),),
            stacked=True,
        ),
        Panel(
            "Shed by tenant",
            "reqps",
            "Requests admitted and then refused: too many waited, or one waited too long.",
            (Query(CHOSEN.rate("tenant_requests_shed", "tenant"), "{{tenant}}"),),
            stacked=True,
        ),
    ),
)
SERVICE = Dashboard(
    "squadron-service",
    "Squadron: service",
    "What clients of Squadron see: requests, latencies, queue, replicas, routers, tenants.",
    (CHOOSE_CLUSTER, CHOOSE_MODEL),
    (NOW, TRAFFIC, LATENCY, ADMISSION, COPIES, TENANTS),
)
