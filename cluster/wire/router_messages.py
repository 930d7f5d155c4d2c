"""What a router says to a replica, but for answers that are kept (`cluster.wire.answer_messages`).

A *stream key* is an integer that a router gives to one choice of one attempt to run a request. Keys rise over the
router's life and are never used twice, so a late word about a former attempt cannot be taken for the present one.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cluster.wire.parts import PROTOCOL_VERSION, Choice, Count, Name, Packed, TraceContext, Waited


class Hello(Packed, tag=1, frozen=True):
    """First message of a router on a new link."""

    router_id: Name
    protocol: Count = PROTOCOL_VERSION


class Submit(Packed, tag=2, frozen=True):
    """Run a request. Choice c of it reports under the key `stream + c`.

    `stream` is above every key the link has carried before: a submit that arrives twice is known by that.
    params: `SamplingParams` as msgpack, read apart from the message so that a bad value harms only its request.
    resume: choice -> output tokens so far, for a request that ran elsewhere before (see `Request.resume`).
    scored: prompt tokens whose log-probabilities are known from there.
    timeout: seconds that are left to it; None = as long as it takes. A span, since clocks differ between machines.
    tenant: whose account it is charged to. story: what it has waited for in the router, earlier attempts included.
    trace: of the attempt, where the router traces it. retried: whether it is not the first attempt.
    """

    stream: Count
    request_id: Name
    prompt: tuple[int, ...]
    params: msgspec.Raw
    seed: int
    priority: int = 0
    cache_salt: bytes = b""
    resume: dict[Choice, tuple[int, ...]] | None = None
    pooling: Literal["last", "mean"] | None = None
    scored: Count = 0
    timeout: Annotated[float, Meta(ge=0)] | None = None
    tenant: Name = ""
    story: tuple[Waited, ...] = ()
    trace: TraceContext | None = None
    retried: bool = False


class Abort(Packed, tag=3, frozen=True):
    """End the attempt submitted under `stream`. Unknown or finished attempts are passed over."""

    stream: Count


class FinishChoice(Packed, tag=4, frozen=True):
    """End one choice of the attempt submitted under `stream`; its other choices go on."""

    stream: Count
    choice: Choice


class Ping(Packed, tag=5, frozen=True):
    """The router is alive, and this waits in it: see `QueueState`.

    submitted: no submit that follows on the link has a stream key below; one that did not come by now was lost.
    """

    queued_requests: Count = 0
    queued_tokens: Count = 0
    queue_age: Annotated[float, Meta(ge=0)] = 0.0
    drain_rate: Annotated[float, Meta(ge=0)] = 0.0
    submitted: Count = 0


class Resync(Packed, tag=6, frozen=True):
    """Tell again all that the prefix cache holds: an update of it did not arrive."""


class Explain(Packed, tag=7, frozen=True):
    """Tell what a request waited for; the answer bears the same ticket.

    name: of the request, to its client. tenant: the request must be this tenant's; None = any.
    """

    ticket: Count
    name: Name
    tenant: Name | None
