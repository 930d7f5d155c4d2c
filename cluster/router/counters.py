"""Counters of one router's dispatcher, read by the metrics collectors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cluster.telemetry.families import BLOCK_SECONDS
from cluster.telemetry.samples import Histogram

# Codes of errors that a request, once it is taken in, ends with by a fault of ours; all others are its client's.
FAULTS = (
    "no_replica",
    "replica_lost",
    "model_changed",
    "out_of_memory",
    "prompt_logprobs_out_of_memory",
    "shutting_down",
    "internal_error",
    "request_quarantined",
)
OUTCOMES = ("completed", "aborted", "deadline_exceeded", "asleep", *FAULTS)  # that alerts go by
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 2.0)


@dataclass(slots=True)
class DispatcherCounters:
    """Counters since the dispatcher was made; requests, accepted = sum(outcomes) + those that live.

    outcomes: "completed", "aborted" (by the consumer), or the code of the error that ended the request.
    links_lost: code of the link's end -> number. migrations: attempts that replaced one on a lost replica.
    stale_rows / stale_reports: what arrived of former attempts and former lives, and was dropped.
    misplaced_rows: tokens at a position that was not the next: a fault of the replica.
    predicted_tokens / found_tokens: prompt tokens that the router expected in the prefix cache of the replica it
        chose, and those that were there, of requests that got a first token and for which it had looked.
    prefilled: tokens of prompts and logs whose attempts have brought their first token.
    """

    accepted: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    links_lost: Counter[str] = field(default_factory=Counter)
    migrations: int = 0
    stale_rows: int = 0
    stale_reports: int = 0
    misplaced_rows: int = 0
    reports: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    found_tokens: int = 0
    prefilled: int = 0
    ttft: Histogram = field(default_factory=Histogram)  # seconds from generate() to the first token
    tpot: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))  # seconds per later token, per request
    latency: Histogram = field(default_factory=Histogram)  # seconds from generate() to the end, completed requests
    device_seconds: Histogram = field(default_factory=Histogram)  # used by a completed request, as far as is known
    block_seconds: Histogram = field(default_factory=lambda: Histogram(BLOCK_SECONDS))  # the same, of KV blocks
