"""What routers and replicas say to each other: one tagged msgpack array per message, checked against its schema.

A *stream key* is an integer that a router gives to one choice of one attempt to run a request. Keys rise over the
router's life and are never used twice, so a late word about a former attempt cannot be taken for the present one.
Going up (router to replica): Hello, Submit, Abort, FinishChoice, Ping, Resync, Explain, Keep, Fetch, Forget,
Disclaim. Coming down: Welcome, Report, Rejected, Heartbeat, Draining, Explained, Begun, Fetched, Orphaned,
Superseded, Followed.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from cluster.accounts.flight_recorder import Wait
from engine.errors import SquadronError
from engine.sampling_params import MAX_N

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


class FinishRow(Packed, frozen=True):
    """The end of one choice. `num_tokens`: output tokens of its whole life, earlier attempts included.

    code: of an error that its client gets as it is: the request itself caused it, ran out of time, or was shed
    by a step without memory. "" = of any other end, of an error inside among them. used: by this attempt.
    """

    stream: Count
    reason: Name
    num_tokens: Count
    message: Text = ""
    code: Text = ""
    used: ResourceUsage = ResourceUsage()


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

    `sequence` counts the updates of one link from 0: after a gap the router asks for all keys (`Resync`).
    """

    sequence: Count
    stored: list[int]
    removed: list[int]
    cleared: bool = False


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


PROTOCOL_VERSION = 14


class DamagedMessageError(SquadronError):
    """Bytes on a link that are no message of the protocol: the link must be closed."""


class DamagedSubmitError(DamagedMessageError):
    """A `Submit` that cannot be read, but for its stream key: that request must be refused, and the link goes on."""

    def __init__(self, message: str, stream: int) -> None:
        super().__init__(message)
        self.stream = stream


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


class Keep(Packed, tag=8, frozen=True):
    """Keep a copy of an answer of this router's, or what is new of it (`cluster.responses.record`).

    It replaces what another router said of a lower epoch, or of the same one under a lower name. head: b"" where it
    was said before. first: index of the first of `notes` among all of the answer's. end: b"" while it runs.
    retention: seconds to keep it after its end, or without a router. age: seconds since its end.
    """

    name: Name
    epoch: Count
    tenant: Name
    head: bytes
    first: Count
    notes: tuple[bytes, ...]
    end: bytes = b""
    retention: Seconds = 0.0
    age: Seconds = 0.0


class Fetch(Packed, tag=9, frozen=True):
    """Tell what is kept of an answer behind its first `known` notes; the answer bears the same ticket.

    tenant: it must be this one's; None = any. wait: seconds to wait for news where there are none. claims: where it
    has no router, it is to be offered to no other one than this, which says `Keep` or `Disclaim`.
    """

    ticket: Count
    name: Name
    tenant: Name | None
    known: Count = 0
    wait: Seconds = 0.0
    claims: bool = False


class Forget(Packed, tag=10, frozen=True):
    """Drop an answer of a tenant's; whoever makes it is told. It is taken in no more, but another by its name is.

    epoch: drop only what `owner` said in this one, without a word to it, and take in others; None = any. owner: ""
    = the router that says this.
    """

    name: Name
    tenant: Name
    epoch: Count | None = None
    owner: Name = ""


class Welcome(Packed, tag=11, frozen=True):
    """First message of a replica: who it is and what it runs. `num_kv_blocks` excludes the null block.

    fingerprint: of the model and its arithmetic (`engine.loader.fingerprint.replica_fingerprint`).
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


class Report(Packed, tag=12, frozen=True):
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
    finishes: list[FinishRow] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    blocks: BlockUpdate | None = None
    prompts: list[PromptRow] = field(default_factory=list)
    pooled: list[PooledRow] = field(default_factory=list)
    others: Count = 0
    costs: ReplicaCosts | None = None

    def __post_init__(self) -> None:
        rows = len(self.streams)
        if len(self.indices) != rows or len(self.tokens) != rows:
            raise ValueError("the columns of a report differ in length")
        if any(row.row >= rows for row in self.logprobs):
            raise ValueError("log-probabilities for a row that the report does not have")


class Rejected(Packed, tag=13, frozen=True):
    """A submit that the replica does not run, and no other would."""

    stream: Count
    code: Name
    message: Text
    param: Name | None = None


class Heartbeat(Packed, tag=14, frozen=True):
    """The replica is alive, and this runs there for the router, whether or not there is anything to report.

    block_updates: those sent on this link so far. others: as in `Report`. running: stream keys of the choices that
    have not ended. submitted: all submits with stream keys below have come here, or never will; what of them is not
    in `running` has ended, and all that was to be said of it went before this message. sleep: None where it cannot be
    put to sleep.
    """

    incarnation: Count
    load: Load
    block_updates: Count = 0
    others: Count = 0
    costs: ReplicaCosts | None = None
    submitted: Count = 0
    running: list[int] = field(default_factory=list)
    sleep: SleepState | None = None


class Draining(Packed, tag=15, frozen=True):
    """The replica is to go: it finishes what it has, and should get nothing new.

    hand_over: its node or process ends soon, whatever runs there: that goes on elsewhere at once, where it can.
    """

    hand_over: bool = False


class Explained(Packed, tag=16, frozen=True):
    """What the replica knows of a request's waiting, the oldest first; nothing of one that did not have to wait."""

    ticket: Count
    events: list[Waited]


class Begun(Packed, tag=17, frozen=True):
    """The step that is run now is the first that computes something for the attempts submitted under `streams`.

    Said before the step is run: what it was run for is then known even if the replica does not live to report it.
    """

    streams: list[Count]


class Fetched(Packed, tag=18, frozen=True):
    """What is kept of an answer; without a name: nothing is. head: b"" where notes were known before.

    more: there are further notes, which fetch as well. owner: the router that made it, with its link if `owned`.
    age: seconds since its end. rival: another router claims it: the first of the two is to have it.
    """

    ticket: Count
    name: Name = ""
    epoch: Count = 0
    head: bytes = b""
    notes: tuple[bytes, ...] = ()
    end: bytes = b""
    more: bool = False
    owner: Name = ""
    owned: bool = False
    age: Seconds = 0.0
    rival: Literal["", "first", "second"] = ""


class Orphaned(Packed, tag=19, frozen=True):
    """The router that made an answer is lost; this one is to go on with it."""

    name: Name


class Superseded(Packed, tag=20, frozen=True):
    """What this router said of an answer is not kept any more: another one has it, in this epoch, or dropped it.

    full: neither, but there is no room for it here; it may be kept elsewhere.
    """

    name: Name
    epoch: Count
    full: bool = False


class Disclaim(Packed, tag=21, frozen=True):
    """This router does not go on with an answer that it claimed: it may be offered to others."""

    name: Name


class Followed(Packed, tag=22, frozen=True):
    """Another router asks for an answer of this one's: somebody waits for it there."""

    name: Name


Up = Hello | Submit | Abort | FinishChoice | Ping | Resync | Explain | Keep | Fetch | Forget | Disclaim
Down = (
    Welcome
    | Report
    | Rejected
    | Heartbeat
    | Draining
    | Explained
    | Begun
    | Fetched
    | Orphaned
    | Superseded
    | Followed
)
Message = Up | Down

# How msgpack begins an array of so many elements (here: bytes of its header), and unsigned integers.
_ARRAY_HEADERS = dict.fromkeys(range(145, 160), 1) | {0xDC: 3, 0xDD: 5}
_FIXINT = 0x7F
_UINT_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_SUBMIT = b"\x02"

_ENCODER = msgspec.msgpack.Encoder()
_UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)


def encode(message: Message) -> bytes:
    """Return the message as one frame."""
    return _ENCODER.encode(message)


def decode_up(frame: bytes) -> Up:
    """Return the message that a router sent. Raises `DamagedMessageError` or, of a submit, `DamagedSubmitError`."""
    try:
        return _UP.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason, stream = f"damaged message from a router: {error}", _stream_of_submit(frame)
        if stream is not None:
            raise DamagedSubmitError(reason, stream) from error
        raise DamagedMessageError(reason) from error


def _stream_of_submit(frame: bytes) -> int | None:
    """Return the stream key of what begins as a submit does, None of anything else.

    By hand: what follows may be nested too deep for any reader, or end too soon.
    """
    array = _ARRAY_HEADERS.get(frame[0]) if frame else None
    if array is None or frame[array : array + 1] != _SUBMIT:
        return None
    key = frame[array + 1 :]
    if key and key[0] <= _FIXINT:
        return key[0]
    size = _UINT_BYTES.get(key[0]) if key else None
    if size is None or len(key) <= size:
        return None
    stream = int.from_bytes(key[1 : 1 + size], "big")
    return stream if stream <= MAX_COUNT else None


def decode_down(frame: bytes) -> Down:
    """Return the message that a replica sent. Raises `DamagedMessageError`."""
    try:
        return _DOWN.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedMessageError(f"damaged message from a replica: {error}") from error
