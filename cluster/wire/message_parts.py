"""What the messages between routers and replicas are made of (`cluster.wire.messages`): rows, figures, contexts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

from engine.sampling_params import MAX_N
from engine.telemetry.flight import Wait

MAX_COUNT = 2**63 - 1
MAX_NAME = 256
MAX_TEXT = 4096
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Choice = Annotated[int, Meta(ge=0, lt=MAX_N)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Seconds = Annotated[float, Meta(ge=0)]


class Packed(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages and their parts: arrays on the wire, so that names cost nothing."""


class Waited(Packed, frozen=True):
    """An event of a request's life that began `age` seconds ago (`engine.telemetry.flight`): clocks differ."""

    age: Seconds
    what: Wait
    detail: Text = ""


class TraceContext(Packed, frozen=True):
    """The span that what is done for a request hangs under, as W3C Trace Context writes it."""

    traceparent: Name
    tracestate: Text = ""


class Load(Packed, frozen=True):
    """Figures of a replica; the first ones as in `EngineStats`. `progress_age`: seconds since its engine moved."""

    num_running: Count = 0
    num_waiting: Count = 0
    outstanding_tokens: Count = 0
    kv_blocks_total: Count = 0
    kv_blocks_free: Count = 0
    kv_blocks_cached: Count = 0
    prefix_query_tokens: Count = 0
    prefix_hit_tokens: Count = 0
    preemptions: Count = 0
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    progress_age: float = 0.0

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that live sequences hold, 0 to 1."""
        used = self.kv_blocks_total - self.kv_blocks_free - self.kv_blocks_cached
        return used / self.kv_blocks_total if self.kv_blocks_total else 0.0


class Usage(Packed, frozen=True):
    """Seconds of a device, and of a KV block, that somebody used (`engine.telemetry.ledger`)."""

    device_seconds: Seconds = 0.0
    block_seconds: Seconds = 0.0


class Costs(Packed, frozen=True):
    """All usage of a replica since it started: `total` = `idle` + all `tenants`, but for rounding to floats.

    grammars: seconds that were spent on compiling each tenant's, beside the device.
    """

    total: Usage
    idle: Usage
    tenants: dict[Name, Usage]
    grammars: dict[Name, Seconds] = field(default_factory=dict)


class FinishRow(Packed, frozen=True):
    """The end of one choice. `num_tokens`: output tokens of its whole life, earlier attempts included.

    code: of an error that its client is told as it is: the request itself caused it, ran out of time, or was shed
    by a step without memory. "" = of any other end, of an error inside among them. used: by this attempt.
    """

    stream: Count
    reason: Name
    num_tokens: Count
    message: Text = ""
    code: Text = ""
    used: Usage = Usage()


class LogprobRow(Packed, frozen=True):
    """Log-probabilities of the token in row `row` of its report; the alternatives best first."""

    row: Count
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptRow(Packed, frozen=True):
    """Log-probabilities of prompt tokens of an attempt, from the one at position `first` on.

    Columns, one entry per token: its own (logprobs, ranks), and the alternatives, best first.
    """

    stream: Count
    first: Count
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    ranks: list[Count]

    def __post_init__(self) -> None:
        if not len(self.logprobs) == len(self.top_ids) == len(self.top_logprobs) == len(self.ranks):
            raise ValueError("the columns of a prompt's log-probabilities differ in length")


class PooledRow(Packed, frozen=True):
    """The pooled state of an attempt: fp32, little-endian."""

    stream: Count
    state: bytes


class BlockUpdate(Packed, frozen=True):
    """What a replica's prefix cache gained and lost, by block key (`block_key`), after `cleared` emptied it.

    `sequence` counts the updates of one link from 0: after a gap the router asks to be told all anew (`Resync`).
    """

    sequence: Count
    stored: list[int]
    removed: list[int]
    cleared: bool = False
