"""What messages between routers and replicas are made of: types of fields, a replica's load, costs, traces."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

from cluster.accounts.flight_recorder import Wait
from engine.sampling_params import MAX_N

PROTOCOL_VERSION = 15
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
    """An event of a request that began `age` seconds ago (`cluster.accounts.flight_recorder`): clocks differ."""

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


class ResourceUsage(Packed, frozen=True):
    """Seconds of a device, and of a KV block, that were used (`cluster.accounts.costs`)."""

    device_seconds: Seconds = 0.0
    block_seconds: Seconds = 0.0


class Counted(Packed, frozen=True):
    """A histogram since a replica started. counts: of each bucket, the last of all above. total: of all values."""

    counts: list[Count]
    total: Seconds


class ReplicaCosts(Packed, frozen=True):
    """All usage of a replica since it started: `total` = `idle` + all `tenants`, but for rounding to floats.

    grammars: seconds that were spent on compiling each tenant's, beside the device. histograms: by the names of their
    families (`cluster.telemetry.families`).
    """

    total: ResourceUsage
    idle: ResourceUsage
    tenants: dict[Name, ResourceUsage]
    grammars: dict[Name, Seconds] = field(default_factory=dict)
    histograms: dict[Name, Counted] = field(default_factory=dict)


class SleepState(Packed, frozen=True):
    """How far a replica has carried out an order to sleep or to wake (`cluster.sleep_orders`).

    ticket / number: of the latest order that it is done with, "" and 0 = of none. level / asleep: at which level
    which parts sleep. released: those of them whose memory is free on all ranks. failed: why that order could not be
    carried out.
    """

    ticket: Name = ""
    number: Count = 0
    level: Count = 0
    asleep: tuple[Name, ...] = ()
    released: tuple[Name, ...] = ()
    failed: Text = ""
