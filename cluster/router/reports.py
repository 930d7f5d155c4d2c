"""Applies what replicas report to the live requests: new tokens, ends, refusals, and what runs where."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec

from cluster.errors import ApiError
from cluster.router.counters import DispatcherCounters
from cluster.router.placement import Placement
from cluster.router.quarantine import Blame
from cluster.router.replica_handle import LiveRequest, ReplicaHandle
from cluster.router.replica_set import ReplicaSet
from cluster.router.token_log import ChoiceLog
from cluster.sleep_orders import ASLEEP
from cluster.telemetry.logs import about_request
from cluster.wire.link import DAMAGED
from cluster.wire.replica_messages import FinishRow, Heartbeat, PooledRow, PromptRow, Rejected, Report
from cluster.wire.router_messages import Abort, FinishChoice
from cluster.wire.translation import pooled_state, prompt_logprobs
from engine.errors import redacted
from engine.grammar.texts import shape
from engine.request import FinishReason
from engine.sampling_params import MAX_N

logger = logging.getLogger(__name__)
LOGPROBS_COUNT = 8  # a pending token with log-probabilities counts as at most this many without
P = ParamSpec("P")


class ReportReader:
    """Reads the messages of all replicas of one router. Used on its event loop.

    live: accepted requests that have not ended, by id; read only. max_pending_tokens: as in `DispatcherConfig`.
    """

    def __init__(
        self,
        live: Mapping[str, LiveRequest],
        replicas: ReplicaSet,
        placement: Placement,
        blame: Blame,
        counters: DispatcherCounters,
        max_pending_tokens: int,
    ) -> None:
        self._live = live
        self._replicas = replicas
        self._placement = placement
        self._blame = blame
        self._counters = counters
        self._max_pending_tokens = max_pending_tokens
        self._clock = asyncio.get_running_loop().time

    def on_report(self, replica: ReplicaHandle, report: Report) -> None:
        """Apply one step of a replica. A report that is not the next of its link is dropped, or ends the link."""
        if report.incarnation != replica.incarnation or report.sequence < replica.next_report:
            self._counters.stale_reports += 1
            return
        if report.sequence > replica.next_report:
            self._replicas.lose(replica, DAMAGED, f"report {replica.next_report} is missing")
            return
        replica.next_report += 1
        replica.note(report)
        self._counters.reports += 1
        watched, wrong = replica.read(report, self._counters)
        for choice in watched:
            self._apply(choice, self._on_new_tokens)
        for choice, problem in wrong:
            self._break_off(choice, problem)
        streams = replica.streams
        for prompt in report.prompts:
            self._apply(streams.get(prompt.stream), self._on_prompt, prompt)
        for pooled in report.pooled:
            self._apply(streams.get(pooled.stream), self._on_pooled, pooled)
        for row in report.finishes:
            self._apply(streams.get(row.stream), self._on_finish, replica, row)
        if report.blocks is not None and not replica.gone:
            self._replicas.note_blocks(replica, report.blocks)

    def on_heartbeat(self, replica: ReplicaHandle, heartbeat: Heartbeat) -> None:
        """Compare what a replica runs with what it should run: move what is missing, end what is not wanted."""
        if heartbeat.incarnation != replica.incarnation:
            return
        running = frozenset(heartbeat.running)
        for stream in {_attempt_of(key) for key in replica.streams.keys() - running}:
            live = replica.live.get(stream)
            if live is not None and stream < heartbeat.submitted:
                names = live.request_id, replica.replica_id
                logger.warning("request %s was lost on replica %s", *names, extra=about_request(live.request_id))
                self._placement.withdraw(live, "lost")
                self._placement.redirect(live, f"replica {replica.replica_id} does not run it")
        for key in running - replica.streams.keys():
            stream = _attempt_of(key)
            ended = FinishChoice(stream, key - stream) if stream in replica.live else Abort(stream)
            self._replicas.send(replica, ended)
        self._replicas.note_heartbeat(replica, heartbeat)

    def on_rejected(self, replica: ReplicaHandle, refusal: Rejected) -> None:
        """End a request that a replica refused."""
        live = replica.live.get(refusal.stream)
        if live is not None:
            self._placement.detach(live, refusal.code)
            if refusal.code == ASLEEP:
                replica.asleep = True  # its next heartbeat says more
                self._replicas.selection.refresh()
                self._placement.move(live, f"replica {replica.replica_id} sleeps")
                return
            self._fail(live, replica, ApiError(refusal.code, refusal.message, param=refusal.param))

    def _apply(
        self,
        choice: ChoiceLog | None,
        act: Callable[Concatenate[ChoiceLog, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Call `act` for one choice, if it still runs; an exception in it ends that request and no other."""
        if choice is None:
            return
        try:
            act(choice, *args, **kwargs)
        except Exception as error:
            request_id = choice.log.request.request_id
            cause, extra = redacted(error), about_request(request_id)
            logger.error("request %s: a report cannot be taken in", request_id, exc_info=cause, extra=extra)
            self._break_off(choice, "what was said of it cannot be taken in")

    def _on_new_tokens(self, choice: ChoiceLog) -> None:
        live = self._progressed(choice)
        if live.first_token_at is None:
            live.first_token_at = self._clock()
            self._counters.ttft.observe(live.first_token_at - live.accepted_at)
        # Fewer may wait where log-probabilities come with each, which take up far more than a token.
        each = min(1 + choice.log.request.params.num_told, LOGPROBS_COUNT)
        most = max(1, self._max_pending_tokens // each)
        choice.check_at = choice.delivered + most
        if choice.pending > most:
            message = f"more than {most} tokens waited for a reader that did not take them"
            self._placement.fail(live, ApiError("slow_consumer", message, status=408, retryable=False))

    def _on_prompt(self, choice: ChoiceLog, row: PromptRow) -> None:
        self._progressed(choice)
        if not choice.log.add_prompt_logprobs(row.first, prompt_logprobs(row, choice.log.request.prompt_token_ids)):
            self._break_off(choice, "log-probabilities of its prompt are not at their place")

    def _on_pooled(self, choice: ChoiceLog, row: PooledRow) -> None:
        choice.log.embedding = pooled_state(row)
        self._progressed(choice)

    def _progressed(self, choice: ChoiceLog) -> LiveRequest:
        """Note that a request's attempt has brought something, and return the request."""
        live = self._live[choice.log.request.request_id]
        attempt = live.attempt
        if attempt is not None and not attempt.progressed:
            self._blame.forget(live)
            if attempt.replica.progressed(live, attempt, self._counters):
                self._placement.has_room()
        return live

    def _on_finish(self, choice: ChoiceLog, replica: ReplicaHandle, row: FinishRow) -> None:
        live = self._live[choice.log.request.request_id]
        if row.reason == FinishReason.ABORT:
            self._placement.detach(live, "given_up")
            self._placement.redirect(live, f"replica {replica.replica_id} gave it up")
        elif row.reason == FinishReason.ERROR and row.code:
            self._fail(live, replica, ApiError(row.code, row.message))
        elif row.reason == FinishReason.ERROR:
            self._break_off(choice, f"replica {replica.replica_id} ended it: {row.message}")
        elif row.num_tokens != len(choice.tokens):
            self._break_off(choice, f"{row.num_tokens} tokens were generated, {len(choice.tokens)} arrived")
        else:
            del replica.streams[row.stream]
            choice.finish(row.reason)
            live.note_use(row.used)
            if live.log.finished:
                self._placement.detach(live)
                live.context.on_end()
            live.log.wake()

    def _break_off(self, choice: ChoiceLog, problem: str) -> None:
        live = self._live[choice.log.request.request_id]
        _log_problem(live, problem)
        self._placement.fail(live, ApiError("internal_error", "the request could not be completed", retryable=True))

    def _fail(self, live: LiveRequest, replica: ReplicaHandle, error: ApiError) -> None:
        """End a request with a replica's error; log it here too unless it is the client's fault."""
        if error.code == "internal_error":
            _log_problem(live, f"replica {replica.replica_id} failed on it: {error.message}")
        self._placement.fail(live, error)


def _log_problem(live: LiveRequest, problem: str) -> None:
    """Log what went wrong with a request, and the form of what its output had to match, which may be why."""
    wanted = live.log.request.params.structured
    form = "" if wanted is None else f"; it had to match {shape(wanted)}"
    logger.error("request %s: %s%s", live.request_id, problem, form, extra=about_request(live.request_id))


def _attempt_of(key: int) -> int:
    """Return the stream key of the attempt that a choice's key belongs to."""
    return key - key % MAX_N
