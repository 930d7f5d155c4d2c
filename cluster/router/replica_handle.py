"""A replica as its router sees it: the link, what runs there, and the reading of its reports."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cluster.router.counters import DispatcherCounters
from cluster.router.prefix_index import PromptKeys
from cluster.router.token_log import ChoiceLog, TokenLog
from cluster.telemetry.tracing import semantics as names
from cluster.token_source import NO_CONTEXT, CallContext
from cluster.wire.link import ReplicaLink
from cluster.wire.parts import Load, ReplicaCosts, ResourceUsage, SleepState, TraceContext
from cluster.wire.replica_messages import Heartbeat, Report
from engine.report import TokenLogprob
from engine.sampling_params import MAX_N


@dataclass(eq=False, slots=True)
class Attempt:
    """One submission of a request to one replica.

    begun: whether the replica computes it, or has. progressed: whether it has brought a token.
    tokens: of prompt and log. uncomputed: those that the replica must compute first, as far as is known.
    migrated: the same of a request that was submitted before, else 0.
    found: prompt tokens that were in its prefix cache, known with the first token.
    """

    replica: ReplicaHandle
    stream: int
    tokens: int
    uncomputed: int
    migrated: int = 0
    begun: bool = False
    progressed: bool = False
    found: int = 0

    @property
    def is_computed(self) -> bool:
        """Whether the replica computes its first token, as far as is known."""
        return self.begun and not self.progressed


class LiveRequest:
    """A request on its way: its token log, where it runs now, and what befell it.

    detours: attempts, one after the other, that brought no token and ended although their replica lived; only a part
        of those that it is hardly the cause of.
    device_seconds / block_seconds: used by its choices that have ended, where they ended (`note_use`).
    predicted: prompt tokens that should be in the prefix cache of the replica chosen last; None = not looked up.
    computed_by: the fingerprint of the replica that brought the last tokens, None before the first.
    trace: its spans, None where it is not traced.
    """

    __slots__ = (
        "accepted_at",
        "attempt",
        "block_seconds",
        "computed_by",
        "context",
        "detours",
        "device_seconds",
        "first_token_at",
        "keys",
        "log",
        "predicted",
        "trace",
        "was_submitted",
    )

    def __init__(self, log: TokenLog, now: float, context: CallContext = NO_CONTEXT) -> None:
        self.log = log
        self.context = context
        self.accepted_at = now
        self.attempt: Attempt | None = None
        self.was_submitted = False
        self.detours = 0.0
        self.first_token_at: float | None = None
        self.keys: PromptKeys | None = None
        self.predicted: int | None = None
        self.computed_by: str | None = None
        self.device_seconds = 0.0
        self.block_seconds = 0.0
        self.trace = None if context.trace is None else context.trace.request(log.request, context.waited)

    def begin_attempt_trace(self, replica_id: str) -> TraceContext | None:
        """Begin the span of an attempt, and return what goes with it to the replica; None where it is not traced."""
        if self.trace is None:
            return None
        return self.trace.attempt(replica_id, sum([len(choice.tokens) for choice in self.log.unfinished()]))

    def end_trace(self) -> None:
        """End the spans with what is known in the end."""
        if self.trace is None:
            return
        log, choices = self.log, self.log.choices.values()
        outcome: dict[str, int | float | list[str]] = {
            names.USAGE_OUTPUT_TOKENS: sum([len(choice.tokens) for choice in choices]),
            names.USAGE_CACHE_READ_INPUT_TOKENS: log.num_cached_tokens,
            names.DEVICE_SECONDS: self.device_seconds,
            names.BLOCK_SECONDS: self.block_seconds,
            names.RESPONSE_FINISH_REASONS: [str(one.finish_reason) for one in choices if one.finish_reason],
        }
        if self.first_token_at is not None:
            seconds = self.first_token_at - self.accepted_at + self.context.waited
            outcome[names.RESPONSE_TIME_TO_FIRST_CHUNK] = round(seconds, 6)
        if log.error is not None:
            self.trace.end(outcome, log.error.code, log.error.status >= 500)
        else:
            self.trace.end(outcome, "" if log.finished else names.CANCELLED)

    def note_use(self, used: ResourceUsage) -> None:
        """Take in what a choice used in its last attempt; what it used on replicas that were lost is not known."""
        self.device_seconds += used.device_seconds
        self.block_seconds += used.block_seconds

    @property
    def request_id(self) -> str:
        """The request's id, made by the server."""
        return self.log.request.request_id


class ReplicaHandle:
    """One life of one replica, while its link holds: the `Candidate` that policies choose among.

    live: stream key of an attempt -> its request. streams: stream key -> the choice that it carries.
    fingerprint: what a stream's replicas must have in common (`DispatcherConfig.identity`); None = all that the
        replica tells. computed_by: all of it.
    probes: suspects that run here, most often one (see `DispatcherConfig.quarantine_deaths`).
    sleep: how it sleeps, as it last said. asleep: whether it does, or refused a request because it does.
    submitted: tokens submitted here by this router in attempts that have brought nothing yet. uncomputed: those of
    them that are in no cache here, as far as is known. migrating: of these, those of requests that were submitted
    before. kv_usage: as in `Load`.
    """

    def __init__(self, link: ReplicaLink, now: float, fingerprint: str | None = None) -> None:
        self.link = link
        self.replica_id = link.replica_id
        self.incarnation = link.incarnation
        self.block_size = link.welcome.block_size
        self.num_kv_blocks = link.welcome.num_kv_blocks
        self.kv_tokens = link.welcome.num_kv_blocks * link.welcome.block_size
        self.fingerprint = link.welcome.fingerprint if fingerprint is None else fingerprint
        self.computed_by = link.welcome.fingerprint
        self.draining = link.welcome.draining
        self.drains_since: float | None = None  # when that was first seen
        self.hands_over = False  # said that what runs there is to go on elsewhere at once
        self.gone = False
        self.gone_at = 0.0  # on the event loop's clock
        self.live: dict[int, LiveRequest] = {}
        self.streams: dict[int, ChoiceLog] = {}
        self.num_of_others = 0  # requests here of other routers, as the replica last said
        self.probes: set[LiveRequest] = set()
        self.submitted = 0
        self.uncomputed = 0
        self.migrating = 0
        self.load = Load()
        self.kv_usage = 0.0
        self.costs: ReplicaCosts | None = None
        self.sleep = SleepState()
        self.asleep = False
        self.last_heard = now
        self.last_ping = now
        self.next_report = 0
        self.reader: asyncio.Task[None] | None = None

    @property
    def takes_requests(self) -> bool:
        """Whether something new may be sent here."""
        return not (self.draining or self.gone or self.asleep or self.link.closed)

    def can_continue(self, live: LiveRequest) -> bool:
        """Whether the model here is the one that the request's tokens came from, if it has any."""
        return live.log.fingerprint in (None, self.fingerprint)

    def progress_age(self, now: float) -> float:
        """Seconds since the engine there is known to have moved."""
        return self.load.progress_age + now - self.last_heard

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens that wait to be computed here: of this router's requests, and of others' as the replica says.

        The replica counts a prompt whole until it starts, cached or not, so ours are taken out of what it says.
        """
        others = self.load.outstanding_tokens - self.submitted
        return self.uncomputed + others if others > 0 else self.uncomputed

    @property
    def uncomputed_new(self) -> int:
        """Prompt tokens of this router's that wait to be computed here, without those that were submitted before."""
        return self.uncomputed - self.migrating

    @property
    def num_requests(self) -> int:
        """Sequences here: as the replica says, or this router's where they are more."""
        load, ours = self.load, len(self.streams)
        said = load.num_running + load.num_waiting
        return said if said > ours else ours

    def note(self, said: Report | Heartbeat) -> None:
        """Take in what the replica says of itself: its figures, and its accounts where they are included."""
        self.num_of_others = said.others
        self.load = said.load
        self.kv_usage = said.load.kv_usage
        if said.costs is not None:
            self.costs = said.costs
        if isinstance(said, Heartbeat) and said.sleep is not None:
            self.sleep, self.asleep = said.sleep, bool(said.sleep.asleep)

    def begun(self, streams: list[int]) -> None:
        """Note which attempts are computed here now: if the replica dies of it, it was one of them."""
        for stream in streams:
            live = self.live.get(stream)
            if live is not None and live.attempt is not None:
                live.attempt.begun = True
                live.context.on_begin()

    def attach(self, live: LiveRequest, stream: int) -> None:
        """Note that `live` was submitted here under `stream`."""
        unfinished = live.log.unfinished()
        for choice in unfinished:
            choice.check_at = len(choice.tokens)
            self.streams[stream + choice.choice] = choice
        tokens = len(live.log.request.prompt_token_ids) + live.log.longest
        uncomputed = tokens - (live.predicted or 0)
        self.submitted += tokens
        self.uncomputed += uncomputed
        self.live[stream] = live
        migrated = uncomputed if live.was_submitted else 0
        self.migrating += migrated
        live.attempt = Attempt(self, stream, tokens, uncomputed, migrated)
        live.was_submitted = True

    def detach(self, live: LiveRequest, attempt: Attempt) -> bool:
        """Forget the attempt: whatever is still said of it is stale. Returns whether others may come for it."""
        for choice in live.log.choices:
            self.streams.pop(attempt.stream + choice, None)
        del self.live[attempt.stream]
        if not attempt.progressed:
            self._computed(attempt)
        live.attempt = None
        return self._end_probe(live) or bool(attempt.migrated)

    def progressed(self, live: LiveRequest, attempt: Attempt, counters: DispatcherCounters) -> bool:
        """Note the attempt's first token: it does not kill the replica. Returns whether others may come for it."""
        attempt.progressed = True
        self._computed(attempt)
        counters.prefilled += attempt.tokens
        if live.predicted is not None and attempt.tokens == len(live.log.request.prompt_token_ids):
            counters.predicted_tokens += live.predicted
            counters.found_tokens += attempt.found
        live.detours = 0.0
        live.log.fingerprint = self.fingerprint
        live.computed_by = self.computed_by
        return self._end_probe(live) or bool(attempt.migrated)

    def read(
        self, report: Report, counters: DispatcherCounters
    ) -> tuple[list[ChoiceLog], list[tuple[ChoiceLog, str]]]:
        """Put the report's tokens into the logs they belong to and wake their consumers.

        Returns the choices that want a closer look (`check_at`), and those with a row that is wrong, and what it is.
        """
        for stream, cached in report.cached:
            self._note_cached(stream, cached, counters)
        watched: list[ChoiceLog] = []
        wrong: list[tuple[ChoiceLog, str]] = []
        stale = 0
        streams = self.streams
        for stream, index, token in zip(report.streams, report.indices, report.tokens, strict=True):
            choice = streams.get(stream)
            if choice is None:
                stale += 1
                continue
            tokens = choice.tokens
            if index != len(tokens):
                wrong.append((choice, "a token is not at its place"))
                continue
            tokens.append(token)
            if index >= choice.check_at:
                watched.append(choice)
            choice.log.wake()
        counters.stale_rows += stale
        counters.misplaced_rows += len(wrong)
        counters.tokens += len(report.streams) - stale - len(wrong)
        for row in report.logprobs:
            choice = streams.get(report.streams[row.row])
            if choice is None:
                continue
            if len(row.top_ids) != len(row.top_logprobs):
                del choice.tokens[report.indices[row.row] :]  # never passed on without them
                wrong.append((choice, "the log-probabilities of a token cannot be read"))
                continue
            top = tuple(zip(row.top_ids, row.top_logprobs, strict=True))
            choice.logprobs.append(TokenLogprob(report.tokens[row.row], row.logprob, top))
        return watched, wrong

    def _computed(self, attempt: Attempt) -> None:
        self.submitted -= attempt.tokens
        self.uncomputed -= attempt.uncomputed
        self.migrating -= attempt.migrated

    def _end_probe(self, live: LiveRequest) -> bool:
        if live not in self.probes:
            return False
        self.probes.remove(live)
        return True

    def _note_cached(self, stream: int, cached: int, counters: DispatcherCounters) -> None:
        choice = self.streams.get(stream)
        live = self.live.get(stream - stream % MAX_N)
        if live is not None and live.attempt is not None:
            live.attempt.found = max(live.attempt.found, cached)
        if choice is not None and not choice.tokens and not choice.log.num_cached_tokens:
            choice.log.num_cached_tokens = cached
            counters.cached_tokens += cached
