"""What an answer tells of its prompts: their text before the output, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cluster.openai.call import Call
from cluster.openai.deltas import Delta, PlacedLogprob
from engine.report import TokenLogprob
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class PromptResult:
    """One prompt. logprobs: of its tokens from the second on, as far as they have come.

    placed: the same of a whole prompt that is echoed, once that was asked for; its choices share it.
    """

    token_ids: tuple[int, ...]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    placed: list[PlacedLogprob] | None = None


class Opening:
    """Puts the prompt before the output of one choice: its text, and where log-probabilities are told, its own.

    Nothing but the prompt is told where no more was asked for: what was drawn is dropped.
    """

    def __init__(self, call: Call, number: int, prompt: PromptResult, tokenizer: Tokenizer) -> None:
        sent = call.prompts[number]
        self._as_sent = isinstance(sent, str) and call.prompt_options.truncate is None
        skip = call.params.skip_special_tokens
        decoded = "" if self._as_sent else tokenizer.decode(prompt.token_ids, skip_special_tokens=skip)
        self._text = str(sent) if self._as_sent else decoded
        self._prompt = prompt
        self._params = call.params
        self._tokenizer = tokenizer
        self._only = call.echo_only
        self._opened = False

    def take(self, delta: Delta) -> Delta:
        """Return `delta` with what belongs before it. The first delta comes after the prompt's log-probabilities."""
        if self._only:
            delta = Delta(delta.choice, "", (), (), delta.finish_reason and "length")
        shift = len(self._text)
        logprobs = [PlacedLogprob(one.logprob, one.text_offset + shift) for one in delta.logprobs]
        if self._opened:
            return Delta(delta.choice, delta.text, delta.token_ids, logprobs, delta.finish_reason)
        self._opened = True
        if self._params.logprobs is not None:
            logprobs = [*self.placed(), *logprobs]
        return Delta(delta.choice, self._text + delta.text, delta.token_ids, logprobs, delta.finish_reason)

    def placed(self) -> list[PlacedLogprob]:
        """Return the prompt's tokens and where each begins; takes milliseconds for a long prompt, once."""
        if self._prompt.placed is None:
            self._prompt.placed = list(self._place())
        return self._prompt.placed

    def _place(self) -> Iterator[PlacedLogprob]:
        """The first token has no log-probability."""
        ids = self._prompt.token_ids
        skip, added = self._params.skip_special_tokens, 0
        if self._as_sent:  # all that was sent is shown, and none of the special tokens that the tokenizer added
            added = self._tokenizer.decode(ids, skip_special_tokens=False).find(self._text)
            skip, added = added < 0, max(added, 0)
        (stream,) = self._tokenizer.text_streams(SamplingParams(skip_special_tokens=skip))
        for token_id, logprob in zip(ids, [None, *self._prompt.logprobs], strict=True):
            offset = min(max(stream.num_chars - added, 0), len(self._text))
            known = TokenLogprob(token_id, 0.0) if logprob is None else logprob
            yield PlacedLogprob(known, offset, told=logprob is not None)
            stream.push((token_id,))


def openings(call: Call, prompts: Sequence[PromptResult], tokenizer: Tokenizer) -> list[Opening | None]:
    """Return what comes before each choice of the call, None where the prompt is not echoed."""
    return [
        Opening(call, number, prompt, tokenizer) if call.echo else None
        for number, prompt in enumerate(prompts)
        for _ in range(call.params.n)
    ]
