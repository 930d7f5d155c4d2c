"""What replicas say of requests, taken into the requests: tokens, ends and refusals, each checked for its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec

from cluster.errors import ApiError
from cluster.router.attempts import Attempts
from cluster.router.blame import Blame
from cluster.router.counters import DispatcherCounters
from cluster.router.fleet import Fleet
from cluster.router.member import LiveRequest, Member
from cluster.router.token_log import ChoiceLog
from cluster.telemetry.log_lines import about_request
from cluster.wire.link import DAMAGED
from cluster.wire.message_parts import FinishRow, PooledRow, PromptRow
from cluster.wire.messages import Abort, FinishChoice, Heartbeat, Rejected, Report
from cluster.wire.translation import pooled_state, prompt_logprobs
from engine.grammar.shape import shape
from engine.request import FinishReason
from engine.sampling_params import MAX_N
from engine.telemetry.wordless import wordless

logger = logging.getLogger(__name__)

_LOGPROBS_COUNT = 8  # times as much as one without, at most, does a token with log-probabilities count while it waits
P = ParamSpec("P")


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
        blame: Blame,
        max_pending_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._attempts = attempts
        self._counters = counters
        self._blame = blame
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
        watched, wrong = member.read(report, self._counters)
        for choice in watched:
            self._alone(choice, self._look_at)
        for choice, problem in wrong:
            self._break_off(choice, problem)
        streams = member.streams
        for prompt in report.prompts:
            self._alone(streams.get(prompt.stream), self._on_prompt, prompt)
        for pooled in report.pooled:
            self._alone(streams.get(pooled.stream), self._on_pooled, pooled)
        for row in report.finishes:
            self._alone(streams.get(row.stream), self._on_finish, member, row)
        blocks = report.blocks
        if blocks is not None and not member.gone:
            self._fleet.note_blocks(member, blocks)

    def on_begun(self, member: Member, streams: list[int]) -> None:
        """Note which attempts a replica computes now: if it dies of it, it was one of them."""
        for stream in streams:
            live = member.live.get(stream)
            if live is not None and live.attempt is not None:
                live.attempt.begun = True
                live.context.on_begin()

    def _alone(
        self,
        choice: ChoiceLog | None,
        act: Callable[Concatenate[ChoiceLog, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Act on what was said of one choice, if it is anybody's; a fault in that ends its request and no other."""
        if choice is None:
            return
        try:
            act(choice, *args, **kwargs)
        except Exception as error:
            request_id = choice.log.request.request_id
            cause, extra = wordless(error), about_request(request_id)
            logger.error("request %s: a report cannot be taken in", request_id, exc_info=cause, extra=extra)
            self._break_off(choice, "what was said of it cannot be taken in")

    def _on_pooled(self, choice: ChoiceLog, row: PooledRow) -> None:
        choice.log.embedding = pooled_state(row)
        self._note_progress(self._live[choice.log.request.request_id])

    def _on_prompt(self, choice: ChoiceLog, row: PromptRow) -> None:
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
        most = self._most_pending(choice)
        choice.check_at = choice.delivered + most
        if choice.pending > most:
            message = f"more than {most} tokens waited for a reader that did not take them"
            self._attempts.fail(live, ApiError("slow_consumer", message, status=408, retryable=False))

    def _most_pending(self, choice: ChoiceLog) -> int:
        """Fewer where log-probabilities come with each, which take up far more than a token."""
        each = 1 + (choice.log.request.params.logprobs or 0)
        return max(1, self._max_pending_tokens // min(each, _LOGPROBS_COUNT))

    def _note_progress(self, live: LiveRequest) -> None:
        attempt = live.attempt
        if attempt is None or attempt.progressed:
            return
        self._blame.forget(live)
        if attempt.member.progressed(live, attempt, self._counters):
            self._attempts.has_room()

    def _break_off(self, choice: ChoiceLog, problem: str) -> None:
        live = self._live[choice.log.request.request_id]
        _tell(live, problem)
        self._attempts.fail(live, ApiError("internal_error", "the request could not be completed", retryable=True))

    def _on_finish(self, choice: ChoiceLog, member: Member, row: FinishRow) -> None:
        live = self._live[choice.log.request.request_id]
        if row.reason == FinishReason.ABORT:
            self._attempts.detach(live, "given_up")
            self._attempts.redirect(live, f"replica {member.replica_id} gave it up")
        elif row.reason == FinishReason.ERROR and row.code:
            self._fail(live, member, ApiError(row.code, row.message))
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
            live.context.on_end()
        live.log.wake()

    def on_heartbeat(self, member: Member, said: Heartbeat) -> None:
        """Compare what a replica runs with what it should: the lost is moved, what nobody wants is ended again."""
        running = frozenset(said.running)
        missing = {_attempt_of(key) for key in member.streams.keys() - running}
        for stream in missing:
            live = member.live.get(stream)
            if live is not None and stream < said.submitted:
                told = live.request_id, member.replica_id
                logger.warning("request %s was lost on replica %s", *told, extra=about_request(live.request_id))
                self._attempts.withdraw(live, "lost")
                self._attempts.redirect(live, f"replica {member.replica_id} does not run it")
        for key in running - member.streams.keys():
            stream = _attempt_of(key)
            ended = FinishChoice(stream, key - stream) if stream in member.live else Abort(stream)
            self._attempts.send(member, ended)

    def on_rejected(self, member: Member, refusal: Rejected) -> None:
        """End a request that a replica refused."""
        live = member.live.get(refusal.stream)
        if live is None:
            return
        self._attempts.detach(live, refusal.code)
        self._fail(live, member, ApiError(refusal.code, refusal.message, param=refusal.param))

    def _fail(self, live: LiveRequest, member: Member, error: ApiError) -> None:
        """End a request as its replica said; where that is no fault of the client's, this log has it too."""
        if error.code == "internal_error":
            _tell(live, f"replica {member.replica_id} failed on it: {error.message}")
        self._attempts.fail(live, error)


def _tell(live: LiveRequest, problem: str) -> None:
    """Log what went wrong with a request, and the form of what its output had to match, which may be why."""
    wanted = live.log.request.params.structured
    form = "" if wanted is None else f"; it had to match {shape(wanted)}"
    logger.error("request %s: %s%s", live.request_id, problem, form, extra=about_request(live.request_id))


def _attempt_of(key: int) -> int:
    """Return the stream key of the attempt that a choice's belongs to."""
    return key - key % MAX_N
