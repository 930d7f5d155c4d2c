"""What a step tells of prompts beside their first token: log-probabilities of their tokens, and pooled states."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from engine.errors import PoisonedLogitsError, ScoresMemoryError
from engine.report import Floats, Logprobs, PromptLogprobs, StepOutputs, TokenLogprob
from engine.request import Sequence
from engine.scheduler.schedule import Schedule

Fail = Callable[[Sequence, Exception], None]


def is_poisoned(outputs: StepOutputs) -> bool:
    """Whether the model gave NaN or infinity for any sequence of the step."""
    scored, pooled = outputs.prompt_logprobs, outputs.pooled
    if outputs.failed or (scored is not None and np.isnan(scored.chosen).any()):
        return True
    return pooled is not None and not np.isfinite(pooled).all()


def take_prompt_logprobs(schedule: Schedule, outputs: StepOutputs, fail: Fail) -> list[PromptLogprobs]:
    """Return the log-probabilities that the step brought, by sequence; `fail` gets those that are NaN or missing.

    Call once per step, before the step's sequences are updated.
    """
    found = outputs.prompt_logprobs
    if found is None:
        for sequence, _, _ in schedule.scores:
            if sequence not in schedule.gone:
                fail(sequence, ScoresMemoryError("there was no memory for the log-probabilities of its prompt"))
        return []
    told: list[PromptLogprobs] = []
    start = 0
    for sequence, first, beyond in schedule.scores:
        rows = range(start, start + beyond - first)
        start = rows.stop
        if sequence in schedule.gone:
            continue
        try:
            told.append(_told(sequence, first, beyond, found, rows))
        except Exception as error:
            fail(sequence, error)
    return told


def take_pooled(schedule: Schedule, outputs: StepOutputs, fail: Fail) -> list[tuple[Sequence, Floats]]:
    """Add what the step pooled to its sequences; return the vectors, [hidden] fp32, of those that are complete.

    `fail` gets those that are not finite. Call once per step, before the step's sequences are updated.
    """
    done: list[tuple[Sequence, Floats]] = []
    if outputs.pooled is None:
        return done
    for (sequence, row), state in zip(schedule.pooled, outputs.pooled, strict=True):
        if sequence in schedule.gone:
            continue
        try:
            _add(sequence, state, starts=not int(schedule.num_computed[row]))
        except Exception as error:
            fail(sequence, error)
            continue
        if sequence.pooled is not None and schedule.seq_lens[row] == sequence.num_prompt_tokens:
            count = sequence.num_prompt_tokens if sequence.request.pooling == "mean" else 1
            done.append((sequence, (sequence.pooled / count).astype(np.float32)))
    return done


def _told(sequence: Sequence, first: int, beyond: int, found: Logprobs, rows: range) -> PromptLogprobs:
    if np.isnan(found.chosen[rows.start : rows.stop]).any():
        raise PoisonedLogitsError("the model's logits were not finite")
    tokens = sequence.request.prompt_token_ids[first + 1 : beyond + 1]
    count = sequence.request.params.prompt_logprobs or 0
    entries = tuple(_entries(found, rows, tokens, count))
    sequence.num_scored_tokens = beyond + 1
    return PromptLogprobs(sequence, first + 1, entries)


def _add(sequence: Sequence, state: Floats, starts: bool) -> None:
    if not np.isfinite(state).all():
        raise PoisonedLogitsError("the model's hidden states were not finite")
    if sequence.pooled is None or starts:
        sequence.pooled = np.zeros(state.shape, np.float64)
    sequence.pooled += state


def _entries(found: Logprobs, rows: range, tokens: tuple[int, ...], count: int) -> Iterator[TokenLogprob]:
    for row, token_id in zip(rows, tokens, strict=True):
        top = zip(found.top_ids[row, :count].tolist(), found.top[row, :count].tolist(), strict=True)
        rank = 0 if found.ranks is None else int(found.ranks[row])
        yield TokenLogprob(token_id, float(found.chosen[row]), tuple(top), rank)
