"""What a replica says to a router, but for answers that are kept (`cluster.wire.answer_messages`).

Stream keys are those of the router (`cluster.wire.router_messages`).
"""

from __future__ import annotations

from msgspec import field

from cluster.wire.parts import (
    PROTOCOL_VERSION,
    Count,
    Load,
    Name,
    Packed,
    ReplicaCosts,
    ResourceUsage,
    SleepState,
    Text,
    Waited,
)


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
