"""A replica as its router sees it: the link, what runs there, and the reading of its reports."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cluster.counters import DispatcherCounters
from cluster.link import ReplicaLink
from cluster.messages import Load, Report
from cluster.policy import Candidate
from cluster.token_log import ChoiceLog, TokenLog
from engine.report import TokenLogprob


@dataclass(eq=False, slots=True)
class Attempt:
    """One submission of a request to one replica. `progressed`: whether it has brought a token."""

    member: Member
    stream: int
    uncomputed: int  # tokens of prompt and log that the replica must compute first
    progressed: bool = False


class LiveRequest:
    """A request on its way: its token log, where it runs now, and what befell it.

    strikes: deaths of replicas, one after the other, under attempts that had brought no token.
    fingerprint: of the model whose tokens it has; None before the first one.
    """

    __slots__ = (
        "accepted_at",
        "attempt",
        "block_keys",
        "fingerprint",
        "first_token_at",
        "log",
        "strikes",
        "was_submitted",
    )

    def __init__(self, log: TokenLog, now: float) -> None:
        self.log = log
        self.accepted_at = now
        self.attempt: Attempt | None = None
        self.was_submitted = False
        self.strikes = 0
        self.first_token_at: float | None = None
        self.block_keys: list[int] | None = None
        self.fingerprint: str | None = None

    @property
    def request_id(self) -> str:
        """The request's id, made by the server."""
        return self.log.request.request_id


class Member:
    """One life of one replica, while its link holds.

    live: stream key of an attempt -> its request. streams: stream key -> the choice that it carries.
    probe: the suspect that runs here, alone of its kind (see `DispatcherConfig.quarantine_deaths`).
    uncomputed: tokens submitted here by this router in attempts that have brought nothing yet.
    """

    def __init__(self, link: ReplicaLink, now: float) -> None:
        self.link = link
        self.replica_id = link.replica_id
        self.incarnation = link.incarnation
        self.block_size = link.welcome.block_size
        self.fingerprint = link.welcome.fingerprint
        self.draining = link.welcome.draining
        self.gone = False
        self.live: dict[int, LiveRequest] = {}
        self.streams: dict[int, ChoiceLog] = {}
        self.probe: LiveRequest | None = None
        self.uncomputed = 0
        self.load = Load()
        self.last_heard = now
        self.last_ping = now
        self.next_report = 0
        self.reader: asyncio.Task[None] | None = None

    @property
    def takes_requests(self) -> bool:
        """Whether something new may be sent here."""
        return not (self.draining or self.gone or self.link.closed)

    def can_continue(self, live: LiveRequest) -> bool:
        """Whether the model here is the one that the request's tokens came from, if it has any."""
        return live.fingerprint is None or live.fingerprint == self.fingerprint

    def progress_age(self, now: float) -> float:
        """Seconds since the engine there is known to have moved."""
        return self.load.progress_age + now - self.last_heard

    def candidate(self, overlap_blocks: int) -> Candidate:
        """Return the figures that the routing policy weighs: the replica's own, or this router's where ahead."""
        load = self.load
        return Candidate(
            self.replica_id,
            max(load.outstanding_tokens, self.uncomputed),
            max(load.num_running + load.num_waiting, len(self.streams)),
            load.kv_usage,
            overlap_blocks * self.block_size,
        )

    def attach(self, live: LiveRequest, stream: int) -> None:
        """Note that `live` was submitted here under `stream`."""
        unfinished = live.log.unfinished()
        for choice in unfinished:
            choice.check_at = len(choice.tokens)
            self.streams[stream + choice.choice] = choice
        tokens = len(live.log.request.prompt_token_ids) + live.log.longest
        self.uncomputed += tokens
        self.live[stream] = live
        live.attempt = Attempt(self, stream, tokens)
        live.was_submitted = True

    def detach(self, live: LiveRequest, attempt: Attempt) -> bool:
        """Forget the attempt: whatever is still said of it is stale. Returns whether it was the probe."""
        for choice in live.log.choices:
            self.streams.pop(attempt.stream + choice, None)
        del self.live[attempt.stream]
        if not attempt.progressed:
            self.uncomputed -= attempt.uncomputed
        live.attempt = None
        return self._end_probe(live)

    def progressed(self, live: LiveRequest, attempt: Attempt) -> bool:
        """Note the attempt's first token: the request does not kill the replica. Returns whether it was the probe."""
        attempt.progressed = True
        self.uncomputed -= attempt.uncomputed
        live.strikes = 0
        live.fingerprint = self.fingerprint
        return self._end_probe(live)

    def read(self, report: Report, counters: DispatcherCounters) -> tuple[list[ChoiceLog], list[ChoiceLog]]:
        """Put the report's tokens into the logs they belong to and wake their consumers.

        Returns the choices that want a closer look (`check_at`), and those with a token that is not the next one.
        """
        for stream, cached in report.cached:
            self._note_cached(stream, cached, counters)
        watched: list[ChoiceLog] = []
        misplaced: list[ChoiceLog] = []
        stale = 0
        streams = self.streams
        for stream, index, token in zip(report.streams, report.indices, report.tokens, strict=True):
            choice = streams.get(stream)
            if choice is None:
                stale += 1
                continue
            tokens = choice.tokens
            if index != len(tokens):
                misplaced.append(choice)
                continue
            tokens.append(token)
            if index >= choice.check_at:
                watched.append(choice)
            choice.log.wake()
        for row in report.logprobs:
            choice = streams.get(report.streams[row.row])
            if choice is not None:
                top = tuple(zip(row.top_ids, row.top_logprobs, strict=True))
                choice.logprobs.append(TokenLogprob(report.tokens[row.row], row.logprob, top))
        counters.stale_rows += stale
        counters.misplaced_rows += len(misplaced)
        counters.tokens += len(report.streams) - stale - len(misplaced)
        return watched, misplaced

    def _end_probe(self, live: LiveRequest) -> bool:
        if self.probe is not live:
            return False
        self.probe = None
        return True

    def _note_cached(self, stream: int, cached: int, counters: DispatcherCounters) -> None:
        choice = self.streams.get(stream)
        if choice is not None and not choice.tokens and not choice.log.num_cached_tokens:
            choice.log.num_cached_tokens = cached
            counters.cached_tokens += cached
