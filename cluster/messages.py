"""What routers and replicas say to each other: one tagged msgpack array per message, checked against its schema.

A *stream key* is an integer that a router gives to one choice of one attempt to run a request. Keys rise over the
router's life and are never used twice, so a late word about a former attempt cannot be taken for the present one.
Going up (router to replica): Hello, Submit, Abort, FinishChoice, Ping, Resync, Explain. Coming down: Welcome, Report,
Rejected, Heartbeat, Draining, Explained.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.errors import SquadronError
from engine.flight import Wait
from engine.sampling_params import MAX_N

PROTOCOL_VERSION = 6

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Choice = Annotated[int, Meta(ge=0, lt=MAX_N)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0)]
MAX_TEXT = 4096


class DamagedMessageError(SquadronError):
    """Bytes on a link that are no message of the protocol: the link must be closed."""


class _Message(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages."""


class Hello(_Message, tag=1, frozen=True):
    """First message of a router on a new link."""

    router_id: Name
    protocol: Count = PROTOCOL_VERSION


class Waited(_Message, frozen=True):
    """An event of a request's life that began `age` seconds ago (`engine.flight`). Ages, since clocks differ."""

    age: Seconds
    what: Wait
    detail: Text = ""


class TraceContext(_Message, frozen=True):
    """The span that what is done for a request hangs under, as W3C Trace Context writes it."""

    traceparent: Name
    tracestate: Text = ""


class Submit(_Message, tag=2, frozen=True):
    """Run a request. Choice c of it reports under the key `stream + c`.

    `stream` is above every key the link has carried before: a submit that arrives twice is known by that.
    params: `SamplingParams` as msgpack, read apart from the message so that a bad value harms only its request.
    resume: choice -> output tokens so far, for a request that ran elsewhere before (see `Request.resume`).
    scored: prompt tokens whose log-probabilities are known from there.
    timeout: seconds that are left to it; None = as long as it takes. A span, since clocks differ between machines.
    tenant: whose account it is charged to. story: what it has waited for in the router, earlier attempts included.
    trace: of the attempt, where the router traces it.
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


class Abort(_Message, tag=3, frozen=True):
    """End the attempt submitted under `stream`. Unknown or finished attempts are passed over."""

    stream: Count


class FinishChoice(_Message, tag=4, frozen=True):
    """End one choice of the attempt submitted under `stream`; its other choices go on."""

    stream: Count
    choice: Choice


class Ping(_Message, tag=5, frozen=True):
    """The router is alive, and this waits in it: see `QueueFigures`."""

    queued_requests: Count = 0
    queued_tokens: Count = 0
    queue_age: Annotated[float, Meta(ge=0)] = 0.0
    drain_rate: Annotated[float, Meta(ge=0)] = 0.0


class Resync(_Message, tag=6, frozen=True):
    """Tell again all that the prefix cache holds: an update of it did not arrive."""


class Explain(_Message, tag=7, frozen=True):
    """Tell what a request waited for; the answer bears the same ticket.

    name: of the request, to its client. tenant: whose it must be, None = anybody's.
    """

    ticket: Count
    name: Name
    tenant: Name | None


class Welcome(_Message, tag=11, frozen=True):
    """First message of a replica: who it is and what it runs. `num_kv_blocks` excludes the null block.

    fingerprint: of the model and its arithmetic (`engine.fingerprint`); a stream goes on only where it is the same.
    """

    replica_id: Name
    incarnation: Count
    model: Text
    max_model_len: Count
    vocab_size: Count
    block_size: Count
    num_kv_blocks: Count
    eos_token_ids: tuple[int, ...] = ()
    draining: bool = False
    fingerprint: Name = ""
    protocol: Count = PROTOCOL_VERSION


class Load(_Message, frozen=True):
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


class Usage(_Message, frozen=True):
    """Seconds of a device, and of a KV block, that somebody used (`engine.ledger`)."""

    device_seconds: Seconds = 0.0
    block_seconds: Seconds = 0.0


class Costs(_Message, frozen=True):
    """All usage of a replica since it started: `total` = `idle` + all `tenants`, but for rounding to floats."""

    total: Usage
    idle: Usage
    tenants: dict[Name, Usage]


class FinishRow(_Message, frozen=True):
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


class LogprobRow(_Message, frozen=True):
    """Log-probabilities of the token in row `row` of its report; the alternatives best first."""

    row: Count
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptRow(_Message, frozen=True):
    """Log-probabilities of prompt tokens of an attempt, from the one at position `first` on.

    Columns, one entry per token: its own (logprobs), and the alternatives, best first.
    """

    stream: Count
    first: Count
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def __post_init__(self) -> None:
        if not len(self.logprobs) == len(self.top_ids) == len(self.top_logprobs):
            raise ValueError("the columns of a prompt's log-probabilities differ in length")


class PooledRow(_Message, frozen=True):
    """The pooled state of an attempt: fp32, little-endian."""

    stream: Count
    state: bytes


class BlockUpdate(_Message, frozen=True):
    """What a replica's prefix cache gained and lost, by block key (`block_key`), after `cleared` emptied it.

    `sequence` counts the updates of one link from 0: after a gap the router asks to be told all anew (`Resync`).
    """

    sequence: Count
    stored: list[int]
    removed: list[int]
    cleared: bool = False


class Report(_Message, tag=12, frozen=True):
    """One engine step as one router sees it. `sequence` counts the reports of one link from 0, without gaps.

    Columns, one row per token: streams (stream key), indices (output position in its choice), tokens.
    cached: (stream key, prompt tokens found in the prefix cache) with the first token of an attempt, where not 0.
    others: requests of other routers here. costs: now and then, on whatever message comes next.
    """

    sequence: Count
    incarnation: Count
    step: Count
    streams: list[int]
    indices: list[int]
    tokens: list[int]
    load: Load
    finishes: list[FinishRow] = []
    logprobs: list[LogprobRow] = []
    cached: list[tuple[int, int]] = []
    blocks: BlockUpdate | None = None
    prompts: list[PromptRow] = []
    pooled: list[PooledRow] = []
    others: Count = 0
    costs: Costs | None = None

    def __post_init__(self) -> None:
        rows = len(self.streams)
        if len(self.indices) != rows or len(self.tokens) != rows:
            raise ValueError("the columns of a report differ in length")
        if any(row.row >= rows for row in self.logprobs):
            raise ValueError("log-probabilities for a row that the report does not have")


class Rejected(_Message, tag=13, frozen=True):
    """A submit that the replica does not run. `elsewhere`: the replica drains, others may well take it."""

    stream: Count
    code: Name
    message: Text
    param: Name | None = None
    elsewhere: bool = False


class Heartbeat(_Message, tag=14, frozen=True):
    """The replica is alive although it had nothing to report.

    block_updates: those sent on this link so far. others: as in `Report`.
    """

    incarnation: Count
    load: Load
    block_updates: Count = 0
    others: Count = 0
    costs: Costs | None = None


class Draining(_Message, tag=15, frozen=True):
    """The replica finishes what it has and takes nothing new."""


class Explained(_Message, tag=16, frozen=True):
    """What the replica knows of a request's waiting, the oldest first; nothing of one that did not have to wait."""

    ticket: Count
    events: list[Waited]


Up = Hello | Submit | Abort | FinishChoice | Ping | Resync | Explain
Down = Welcome | Report | Rejected | Heartbeat | Draining | Explained
Message = Up | Down

_ENCODER = msgspec.msgpack.Encoder()
_UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)


def encode(message: Message) -> bytes:
    """Return the message as one frame."""
    return _ENCODER.encode(message)


def decode_up(frame: bytes) -> Up:
    """Return the message that a router sent. Raises `DamagedMessageError`."""
    try:
        return _UP.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedMessageError(f"damaged message from a router: {error}") from error


def decode_down(frame: bytes) -> Down:
    """Return the message that a replica sent. Raises `DamagedMessageError`."""
    try:
        return _DOWN.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedMessageError(f"damaged message from a replica: {error}") from error
