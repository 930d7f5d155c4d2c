"""Takes in the results of a step: tokens of its sequences, and failures of single requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine.errors import (
    GrammarError,
    IntegrityError,
    InvalidRequestError,
    PoisonedLogitsError,
    StepMemoryError,
    redacted,
)
from engine.report import Ints
from engine.request import FinishReason, Sequence
from engine.scheduler.batch_state import BatchState
from engine.scheduler.schedule import RowBlocks, Schedule
from engine.scheduler.slots import Slots

logger = logging.getLogger(__name__)

OWN = (InvalidRequestError, GrammarError, PoisonedLogitsError, StepMemoryError)  # errors of one request alone


class FailureGuard:
    """Runs the parts of a step that concern a single sequence, and ends the requests whose part raised.

    An `IntegrityError` is never one request's: it is passed on, and the engine ends. Any other error that is not
    known for a request's own is a bug of ours; where the part changes what all sequences share, it may have left
    that half changed. Then the request ends, and everything is `in_doubt` until all invariants were checked.
    """

    def __init__(self, batch: BatchState) -> None:
        self.in_doubt = False
        self._batch = batch
        self._failed: list[tuple[Sequence, Exception]] = []

    def run(self, sequence: Sequence, action: Callable[..., Any], *args: Any) -> Any:
        """Return what `action` returns, or None if it raised: `end_failed` then ends the request of `sequence`."""
        try:
            return action(*args)
        except Exception as error:
            self.in_doubt = self.in_doubt or not isinstance(error, OWN)
            self.mark(sequence, error)
            return None

    def mark(self, sequence: Sequence, error: Exception) -> None:
        """Note that work for `sequence` failed, which changed nothing that others share."""
        if isinstance(error, IntegrityError):
            raise error
        self._failed.append((sequence, error))

    def is_marked(self, sequence: Sequence) -> bool:
        """Whether work for the request of `sequence` failed in this step: no part of it may end well any more."""
        return any(failed.request is sequence.request for failed, _ in self._failed)

    def end_failed(self) -> None:
        """End the marked requests with ERROR. Only where no arrays of a step that hold their rows are in use.

        Raises `IntegrityError` where what one holds cannot be taken back.
        """
        while self._failed:
            sequence, error = self._failed.pop()
            try:
                self._end(sequence.request.request_id, error)
            except Exception as failure:
                raise IntegrityError(f"a request that failed cannot be ended ({type(failure).__name__})") from failure

    def _end(self, request_id: str, error: Exception) -> None:
        about = {"squadron": {"request_id": request_id}}  # fields of the line, where lines have any
        if isinstance(error, InvalidRequestError):
            logger.info("request %s cannot go on: %s", request_id, error.code, extra=about)
            message, code = str(error), error.code
        elif isinstance(error, StepMemoryError):
            logger.error("request %s is shed: %s", request_id, error, extra=about)
            message, code = error.client_message, error.code
        else:
            logger.error("request %s failed in the engine", request_id, exc_info=redacted(error), extra=about)
            message = f"the engine failed on this request ({type(error).__name__})"
            code = "internal_error" if isinstance(error, GrammarError) else ""  # it would fail again: do not retry
        self._batch.finish_request(request_id, FinishReason.ERROR, message, code)


class Updater:
    """Takes in the results of steps: names full blocks, forks, writes tokens, ends sequences.

    Vectorised over rows, with Python loops only where something happens.
    """

    def __init__(self, slots: Slots, batch: BatchState, guard: FailureGuard) -> None:
        self._slots = slots
        self._tables = slots.tables
        self._batch = batch
        self._guard = guard
        self._shift = slots.pool.block_size.bit_length() - 1
        self._seals = slots.pool.enable_prefix_caching

    def collect(
        self, schedule: Schedule, token_ids: Ints, counts: Ints | None, failed: Mapping[int, Exception]
    ) -> Ints | None:
        """Take in a step that was run; requests of samples `failed`, none of them gone, end in an error.

        token_ids: of `schedule.samples`, run by run. counts: tokens of each run, at least 1; None = 1 each.
        Returns how many tokens of each run its sequence got, [num_samples]; None = one each.
        """
        self._batch.land(schedule)
        for row, error in failed.items():
            self._guard.mark(schedule.samples[row], error)
        if self._seals:
            self._seal(schedule)
        if self._slots.states is not None and schedule.states is not None:
            self._slots.states.collect(schedule, schedule.states)
        for leader in schedule.forks:
            if leader not in schedule.gone:
                self._guard.run(leader, self._batch.fork, leader)
        for sequence, row in schedule.pooled:
            whole = schedule.seq_lens[row] == sequence.num_prompt_tokens
            if whole and sequence not in schedule.gone and not self._guard.is_marked(sequence):
                self._guard.run(sequence, self._batch.finish, sequence, FinishReason.STOP)
        kept = None
        if counts is None and not schedule.gone and not failed:
            self._write_one_each(schedule, token_ids)
        else:
            kept = np.ones(len(schedule.samples), np.int32) if counts is None else counts.copy()
            self._write_runs(schedule, token_ids, kept, failed)
        self._guard.end_failed()
        self._batch.refresh()
        return kept

    def _seal(self, schedule: Schedule) -> None:
        """Name the blocks that the step filled."""
        together, singly = self._filled(schedule)
        try:
            if len(together.rows):
                self._slots.seal_last(together)
        except IntegrityError:
            raise
        except Exception:
            self._guard.in_doubt = True
            logger.warning("blocks could not be sealed together and are sealed one by one", exc_info=True)
            singly += together.rows.tolist()
        for row in singly:
            sequence = schedule.sequences[row]
            computed = int(schedule.num_computed[row]), int(schedule.seq_lens[row])
            self._guard.run(sequence, self._slots.seal, sequence, *computed)

    def _filled(self, schedule: Schedule) -> tuple[RowBlocks, list[int]]:
        """Return the blocks that decoding sequences filled, and the rows of others that filled some."""
        if schedule.continued is not None and not schedule.gone:
            return schedule.continued.full, []
        filled = ((schedule.seq_lens >> self._shift) > (schedule.num_computed >> self._shift)).nonzero()[0]
        if schedule.gone:
            filled = filled[[schedule.sequences[row] not in schedule.gone for row in filled.tolist()]]
        decoded, others = filled, []
        if not schedule.decode:
            by_one = schedule.query_lens[filled] == 1
            decoded, others = filled[by_one], filled[~by_one].tolist()
        return self._slots.last_blocks(schedule.sequences, schedule.slots, schedule.seq_lens, decoded), others

    def _write_one_each(self, schedule: Schedule, token_ids: Ints) -> None:
        """Put the drawn tokens at their positions, and end the sequences that are done."""
        tables, slots, positions = self._tables, schedule.sample_slots, schedule.sample_positions
        continued = schedule.continued
        places = slots * tables.tokens_per_slot + positions if continued is None else continued.draw_places
        tables.flat_tokens[places] = token_ids
        if self._slots.any_structured:
            for row in self._slots.structured[slots].nonzero()[0].tolist():
                self._match(schedule.samples[row], int(token_ids[row]), int(positions[row]))
        ended = self._slots.stops.hits(token_ids)
        if continued is None:
            ended = np.logical_or(ended, positions + 1 >= tables.limits[slots])
        for row in ended.nonzero()[0].tolist():
            sequence = schedule.samples[row]
            self._guard.run(sequence, self._end_if_done, sequence, int(token_ids[row]), int(positions[row]))

    def _write_runs(self, schedule: Schedule, token_ids: Ints, kept: Ints, failed: Mapping[int, Exception]) -> None:
        """As `_write_one_each`, for runs of tokens. kept: the length of each run, cut here to what is wanted of it.

        A run is cut behind the token that ends its sequence. A sequence that got several tokens has more than the
        last one left to compute.
        """
        tables, slots, positions = self._tables, schedule.sample_slots, schedule.sample_positions
        starts = kept.cumsum() - kept
        np.minimum(kept, tables.limits[slots] - positions, out=kept)
        dropped = [row for row, sequence in enumerate(schedule.samples) if sequence in schedule.gone]
        kept[[*dropped, *failed]] = 0
        for place in self._slots.stops.hits(token_ids).nonzero()[0].tolist():
            row = int(starts.searchsorted(place, side="right")) - 1
            number = place - int(starts[row])
            if number < kept[row] and self._stops(
                schedule.samples[row], int(token_ids[place]), positions[row] + number
            ):
                kept[row] = number + 1
        rows = np.repeat(np.arange(len(kept)), kept)
        within = np.arange(len(rows)) - np.repeat(kept.cumsum() - kept, kept)
        drawn = token_ids[starts[rows] + within]
        tables.flat_tokens[slots[rows] * tables.tokens_per_slot + positions[rows] + within] = drawn
        there = kept.nonzero()[0]
        longer = (kept > 1).nonzero()[0]
        self._batch.extend(schedule, longer, kept[longer] - 1)  # one of each run is counted
        if self._slots.any_structured:
            for place in self._slots.structured[slots[rows]].nonzero()[0].tolist():
                row = rows[place]
                self._match(schedule.samples[row], int(drawn[place]), int(positions[row] + within[place]))
        last = drawn[kept.cumsum()[there] - 1]
        ended = np.logical_or(
            tables.num_tokens[slots[there]] >= tables.limits[slots[there]], self._slots.stops.hits(last)
        )
        for row, token in zip(there[ended].tolist(), last[ended].tolist(), strict=True):
            sequence, position = schedule.samples[row], int(positions[row] + kept[row]) - 1
            self._guard.run(sequence, self._end_if_done, sequence, token, position)

    def _match(self, sequence: Sequence, token: int, position: int) -> None:
        """Let its grammar know of a token, where it does not know it of the step after."""
        if not self._guard.is_marked(sequence):
            try:
                sequence.match(token, position + 1 - sequence.num_prompt_tokens)
            except Exception as error:
                self._guard.mark(sequence, error)

    def _stops(self, sequence: Sequence, token: int, position: int) -> bool:
        """Whether `token`, drawn at `position`, is one that ends `sequence`."""
        request = sequence.request
        drawn = position + 1 - sequence.num_prompt_tokens
        return token in self._slots.stops.of(request) and bool(drawn > request.params.min_tokens)

    def _end_if_done(self, sequence: Sequence, token: int, position: int) -> None:
        """End `sequence` if its last token was drawn: `token`, at `position`."""
        if self._guard.is_marked(sequence):
            return  # its last token is there, but not all else that was asked for
        if self._stops(sequence, token, position):
            sequence.stop_token = token
            self._batch.finish(sequence, FinishReason.STOP)
        elif position + 1 >= self._tables.limits[sequence.slot]:
            self._batch.finish(sequence, FinishReason.LENGTH)
