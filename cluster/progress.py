"""What replicas say of requests, taken into the requests: tokens, ends and refusals, each checked for its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from cluster.attempts import Attempts
from cluster.counters import DispatcherCounters
from cluster.errors import ApiError
from cluster.fleet import Fleet
from cluster.link import DAMAGED
from cluster.log_lines import about_request
from cluster.member import LiveRequest, Member
from cluster.message_parts import FinishRow, PromptRow
from cluster.messages import Rejected, Report
from cluster.token_log import ChoiceLog
from cluster.translation import pooled_state, prompt_logprobs
from engine.request import FinishReason

logger = logging.getLogger(__name__)


class Progress:
    """Moves live requests on by what replicas report. Used by one dispatcher, on its event loop.

    live: by request id. max_pending_tokens: of a choice that nobody takes, after which its request is ended.
    clock: the event loop's.
    """

    def __init__(
        self,
        live: Mapping[str, LiveRequest],
        fleet: Fleet,
        attempts: Attempts,
        counters: DispatcherCounters,
        max_pending_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._attempts = attempts
        self._counters = counters
        self._max_pending_tokens = max_pending_tokens
        self._clock = clock

    def on_report(self, member: Member, report: Report) -> None:
        """Take in one step of a replica; one that is not the next of its link is dropped, or ends the link."""
        if report.incarnation != member.incarnation or report.sequence < member.next_report:
            self._counters.stale_reports += 1
            return
        if report.sequence > member.next_report:
            self._fleet.lose(member, DAMAGED, f"report {member.next_report} is missing")
            return
        member.next_report += 1
        member.note_load(report.load, report.others)
        member.note_costs(report.costs)
        self._counters.reports += 1
        watched, misplaced = member.read(report, self._counters)
        for choice in watched:
            self._look_at(choice)
        for choice in misplaced:
            self._break_off(choice, "a token is not at its place")
        for prompt in report.prompts:
            self._on_prompt(member, prompt)
        for pooled in report.pooled:
            if (pooling := member.streams.get(pooled.stream)) is not None:
                pooling.log.embedding = pooled_state(pooled)
                self._note_progress(self._live[pooling.log.request.request_id])
        for row in report.finishes:
            self._on_finish(member, row)
        blocks = report.blocks
        if blocks is not None and not member.gone:
            self._fleet.note_blocks(member, blocks)

    def _on_prompt(self, member: Member, row: PromptRow) -> None:
        choice = member.streams.get(row.stream)
        if choice is None:
            return
        live = self._live[choice.log.request.request_id]
        self._note_progress(live)
        if not choice.log.tell_prompt(row.first, prompt_logprobs(row, choice.log.request.prompt_token_ids)):
            self._break_off(choice, "log-probabilities of its prompt are not at their place")

    def _look_at(self, choice: ChoiceLog) -> None:
        live = self._live[choice.log.request.request_id]
        self._note_progress(live)
        if live.first_token_at is None:
            live.first_token_at = self._clock()
            self._counters.ttft.observe(live.first_token_at - live.accepted_at)
        choice.check_at = choice.delivered + self._max_pending_tokens
        if choice.pending > self._max_pending_tokens:
            message = f"more than {self._max_pending_tokens} tokens waited for a reader that did not take them"
            self._attempts.fail(live, ApiError("slow_consumer", message, status=408, retryable=False))

    def _note_progress(self, live: LiveRequest) -> None:
        attempt = live.attempt
        if attempt is None or attempt.progressed:
            return
        if attempt.member.progressed(live, attempt, self._counters):
            self._attempts.probe_ended()

    def _break_off(self, choice: ChoiceLog, problem: str) -> None:
        live = self._live[choice.log.request.request_id]
        logger.error("request %s: %s", live.request_id, problem, extra=about_request(live.request_id))
        self._attempts.fail(live, ApiError("internal_error", "the request could not be completed", retryable=True))

    def _on_finish(self, member: Member, row: FinishRow) -> None:
        choice = member.streams.get(row.stream)
        if choice is None:
            return
        live = self._live[choice.log.request.request_id]
        if row.reason == FinishReason.ABORT:
            self._attempts.detach(live, "given_up")
            self._attempts.move(live, f"replica {member.replica_id} gave it up")
        elif row.reason == FinishReason.ERROR and row.code:
            self._attempts.fail(live, ApiError(row.code, row.message))
        elif row.reason == FinishReason.ERROR:
            self._break_off(choice, f"replica {member.replica_id} ended it: {row.message}")
        elif row.num_tokens != len(choice.tokens):
            self._break_off(choice, f"{row.num_tokens} tokens were generated, {len(choice.tokens)} arrived")
        else:
            self._complete(member, live, choice, row)

    def _complete(self, member: Member, live: LiveRequest, choice: ChoiceLog, row: FinishRow) -> None:
        del member.streams[row.stream]
        choice.finish(row.reason)
        live.note_use(row.used)
        if live.log.finished:
            self._attempts.detach(live)
        live.log.wake()

    def on_rejected(self, member: Member, refusal: Rejected) -> None:
        """End a request that a replica refused, or try another where that one only drains."""
        live = member.live.get(refusal.stream)
        if live is None:
            return
        member.draining = member.draining or refusal.elsewhere
        self._attempts.detach(live, refusal.code)
        if refusal.elsewhere:
            self._attempts.place(live)
        else:
            self._attempts.fail(live, ApiError(refusal.code, refusal.message, param=refusal.param))
