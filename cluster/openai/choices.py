"""One choice of an answer: from the tokens that come to what is new in it, and what it says of its prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cluster.openai.call import Call
from cluster.openai.parsers.reader import CallDelta, merged
from cluster.openai.parsers.reasoning import AnswerParser
from cluster.token_source import TokenChunk
from engine.report import TokenLogprob
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import TextStream
from engine.text.tokenizer import Tokenizer

_PROMPT_END = 16  # tokens of a prompt that show whether its answer starts with thinking


@dataclass(frozen=True, slots=True)
class PlacedLogprob:
    """Log-probabilities of one token, and the character of the choice's text at which the token begins.

    told: False for the first token of a prompt, which has no log-probability.
    """

    logprob: TokenLogprob
    text_offset: int
    told: bool = True


@dataclass(slots=True)
class Delta:
    """What is new in one choice. `finish_reason` comes with its last delta; the text may be empty in any.

    calls and reasoning: what of the text was found to be calls of tools, or thoughts before the answer.
    stop_string: that ended the choice, "" where none did.
    """

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PlacedLogprob] = ()
    finish_reason: str | None = None
    calls: Sequence[CallDelta] = ()
    reasoning: str = ""
    stop_string: str = ""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a whole call, as it is billed: every token generated counts, shown or not.

    cached_tokens: of the prompts, found in a prefix cache; None = not reported. reasoning_tokens: those of the output
    that were thinking; None where thinking is not parsed.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    reasoning_tokens: int | None = None


class Choice:
    """Turns the token chunks of one choice into deltas."""

    def __init__(
        self,
        index: int,
        stream: TextStream,
        opening: Opening | None = None,
        parser: AnswerParser | None = None,
        shows_thinking: bool = True,
    ) -> None:
        self._shows_thinking = shows_thinking
        self.done = False
        self.reasoning_tokens = 0
        self._index = index
        self._stream = stream
        self._opening = opening
        self._parser = parser

    def prepare(self) -> None:
        """Work out what the first delta holds of an echoed prompt, so that `take` does not take long."""
        if self._opening is not None:
            self._opening.placed()

    @property
    def num_tokens(self) -> int:
        """Tokens used so far."""
        return self._stream.num_tokens

    def take(self, chunk: TokenChunk) -> Delta:
        """Return what `chunk` adds; sets `done` with the last delta."""
        if self._parser is None or len(chunk.token_ids) < 2:
            return self._take(chunk)
        # Token by token: which of them were thinking, and which came after the last call, does not depend on the cut.
        parts: list[Delta] = []
        for one in _cut(chunk):
            parts.append(self._take(one))
            if self.done:
                break
        return _joined(parts)

    def _take(self, chunk: TokenChunk) -> Delta:
        stream, ids = self._stream, chunk.token_ids
        before = stream.num_tokens
        stop_token = chunk.finish_reason == "stop" and bool(ids)
        if chunk.logprobs:
            text, placed = self._push_placed(chunk, stop_token)
        else:
            text, placed = stream.push(ids, stop_token), []
        reason = chunk.finish_reason
        if reason is not None and not stream.stopped:
            text += stream.flush()
        if stream.stopped:
            reason = "stop"
            ids = ids[: stream.num_tokens - before]
        self.done = reason is not None
        delta = Delta(self._index, text, ids, placed, reason, stop_string=stream.stop_string)
        if self._parser is not None:
            return self._parsed(delta, self._parser)
        return delta if self._opening is None else self._opening.take(delta)

    def _parsed(self, delta: Delta, parser: AnswerParser) -> Delta:
        """Sort the text into thinking, content and calls; the choice is done when its one call is complete."""
        found = parser.feed(delta.text)
        delta.reasoning, delta.text, delta.calls = found.reasoning, found.content, found.calls
        if found.reasoning:
            self.reasoning_tokens = self.num_tokens  # thinking comes first, so all tokens so far were of it
        if delta.finish_reason is not None:
            rest = parser.finish()
            if parser.within_thinking:
                self.reasoning_tokens = self.num_tokens
            delta.reasoning += rest.reasoning
            delta.text += rest.content
            delta.calls = merged((*found.calls, *rest.calls))
        elif parser.done:
            self.done = True
            delta.finish_reason = "stop"
        delta.finish_reason = delta.finish_reason and parser.finish_reason(delta.finish_reason)
        if not self._shows_thinking:
            delta.reasoning = ""
        return delta

    def _push_placed(self, chunk: TokenChunk, stop_token: bool) -> tuple[str, list[PlacedLogprob]]:
        """Push token by token, noting where in the text each begins."""
        text, placed = "", []
        last = len(chunk.token_ids) - 1
        for i, (token_id, logprob) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=True)):
            placed.append(PlacedLogprob(logprob, self._stream.num_chars))
            text += self._stream.push((token_id,), stop_token and i == last)
            if self._stream.stopped:
                break
        return text, placed


def _cut(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """Yield the chunk token by token."""
    last = len(chunk.token_ids) - 1
    for i, token in enumerate(chunk.token_ids):
        reason = chunk.finish_reason if i == last else None
        yield replace(chunk, token_ids=(token,), logprobs=chunk.logprobs[i : i + 1], finish_reason=reason)


def _joined(parts: Sequence[Delta]) -> Delta:
    """Return deltas of one choice that follow each other as one."""
    return replace(
        parts[-1],
        text="".join([one.text for one in parts]),
        reasoning="".join([one.reasoning for one in parts]),
        token_ids=[token for one in parts for token in one.token_ids],
        logprobs=[entry for one in parts for entry in one.logprobs],
        calls=merged(call for one in parts for call in one.calls),
    )


def answer_parser(call: Call, request: Request, choice: int, tokenizer: Tokenizer) -> AnswerParser | None:
    """Return the parser of one choice, None where all text is content."""
    if call.tool_use is None and call.thinking is None:
        return None
    thinking = None
    if call.thinking is not None:
        end = tokenizer.decode(request.prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
        thinking = call.thinking(call.thinking.starts_within(end))
    tools = None if call.tool_use is None else call.tool_use.new_parser(f"{call.request_id}-{choice}")
    return AnswerParser(thinking, tools)


@dataclass(slots=True)
class PromptResult:
    """One prompt. logprobs: of its tokens from the second on, as far as they have come.

    placed: the same of a whole prompt that is echoed, once that was asked for; its choices share it.
    """

    token_ids: tuple[int, ...]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    placed: list[PlacedLogprob] | None = None


class Opening:
    """Puts the prompt before the output of one choice: its text, and where log-probabilities are asked for, its own.

    Nothing but the prompt is sent where no more was asked for: what was drawn is dropped.
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


class Collected:
    """Gathers the deltas of one choice."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PlacedLogprob] = []
        self._calls: list[CallDelta] = []
        self._reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._calls.extend(delta.calls)
        self._reason = delta.finish_reason

    def whole(self, index: int) -> tuple[str, Delta]:
        """Return the text and one delta with everything else."""
        reasoning = "".join(self._reasoning)
        whole = Delta(index, "", self._token_ids, self._logprobs, self._reason, self._calls, reasoning)
        return "".join(self._texts), whole
