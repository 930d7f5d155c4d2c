"""From what the model returned to what the report says: checks, tokens, log-probabilities, reasons of failures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.errors import InvalidRequestError, PoisonedLogitsError
from engine.report import Logprobs, StepOutputs, StepReport, TokenLogprob
from engine.request import Sequence
from engine.scheduler.schedule import Schedule

Fail = Callable[[Sequence, Exception], None]


def find_fault(outputs: StepOutputs, num_samples: int, wants_logprobs: bool, vocab_size: int) -> str | None:
    """Return why outputs cannot be those of a step that drew `num_samples` tokens; None if they can."""
    tokens = outputs.token_ids
    if tokens.dtype != np.int32 or tokens.shape != (num_samples,):
        return f"the executor returned {tokens.dtype}{list(tokens.shape)} for {num_samples} tokens of int32"
    if num_samples and int(tokens.view(np.uint32).max()) >= vocab_size:  # negative ids are large ones here
        return f"the executor drew a token outside the vocabulary of {vocab_size}"
    if wants_logprobs and num_samples and outputs.logprobs is None:
        return "the executor returned no log-probabilities although some were asked for"
    return None


def fill(report: StepReport, schedule: Schedule, outputs: StepOutputs, fail: Fail) -> None:
    """Put the drawn tokens into the report, without those of rows that failed or that nobody wants any more."""
    tokens, samples = outputs.token_ids.tolist(), schedule.samples
    if outputs.logprobs is not None:
        report.logprobs = _logprobs(schedule, tokens, outputs.logprobs, fail)
    report.sequences, report.token_ids = samples, tokens
    if outputs.failed or outputs.stuck or schedule.gone:
        left_out = {*outputs.failed, *outputs.stuck}
        kept = [row for row, one in enumerate(samples) if row not in left_out and one not in schedule.gone]
        report.sequences = [samples[row] for row in kept]
        report.token_ids = [tokens[row] for row in kept]
        report.logprobs = {new: report.logprobs[row] for new, row in enumerate(kept) if row in report.logprobs}


def failures(schedule: Schedule, outputs: StepOutputs) -> dict[int, Exception]:
    """Return why rows of a step gave no token, of sequences that are still there."""
    if not (outputs.failed or outputs.stuck):
        return {}
    poisoned = PoisonedLogitsError("the model's logits were not finite")
    found: dict[int, Exception] = dict.fromkeys(outputs.failed, poisoned)
    found |= {row: _stuck(schedule.samples[row]) for row in outputs.stuck}
    return {row: error for row, error in found.items() if schedule.samples[row] not in schedule.gone}


def _logprobs(schedule: Schedule, token_ids: list[int], found: Logprobs, fail: Fail) -> dict[int, TokenLogprob]:
    """Return the figures of those that asked, each cut to as many as it asked for."""
    logprobs: dict[int, TokenLogprob] = {}
    for row, sequence in enumerate(schedule.samples):
        count = sequence.request.params.logprobs
        if count is None or sequence in schedule.gone:
            continue
        try:
            top = zip(found.top_ids[row, :count].tolist(), found.top[row, :count].tolist(), strict=True)
            logprobs[row] = TokenLogprob(token_ids[row], float(found.chosen[row]), tuple(top))
        except Exception as error:
            fail(sequence, error)
    return logprobs


def _stuck(sequence: Sequence) -> Exception:
    """Where its grammar, if it has one, left tokens, nothing but what the client asked for can be the reason."""
    if sequence.mismatch is not None:
        return sequence.mismatch
    rules = "min_tokens" if sequence.request.params.structured is None else "what the output must match"
    return InvalidRequestError(
        f"allowed_token_ids, bad_words and {rules} together leave no token to draw; allow more tokens",
        code="no_token_left",
    )
