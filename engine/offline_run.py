"""One batch of requests through the engine core, from the first step to the texts; Ctrl-C waits for a step's end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection
from collections.abc import Sequence as Items
from types import FrameType, TracebackType
from typing import Self

from engine.core import EngineCore
from engine.errors import InvalidRequestError, PromptTooLongError
from engine.grammar.base import GrammarCompiler
from engine.outputs import CompletionOutput
from engine.report import StepReport, TokenLogprob
from engine.request import FinishReason, Request, Sequence
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import TextStream
from engine.text.tokenizer import Tokenizer


class DeferredInterrupt:
    """While this context is open, Ctrl-C waits for the next `check`; a second Ctrl-C does not wait.

    Does nothing outside the main thread, and nothing where the program handles SIGINT in a way of its own.
    """

    def __init__(self) -> None:
        self._asked = False
        self._active = False

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._active = False
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise the `KeyboardInterrupt` that came since the context was opened."""
        if self._asked:
            self._asked = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            signal.default_int_handler(number, frame)
        self._asked = True


class ChoiceRun:
    """Tokens of one choice. Its text is made once at the end, unless stop strings have to be watched for.

    stop_reasons: ids that are told as what ended it.
    """

    def __init__(self, index: int, stream: TextStream, params: SamplingParams, stop_reasons: Collection[int]) -> None:
        self.reason: FinishReason | None = None
        self._index = index
        self._stream = stream
        self._stop_reasons = stop_reasons
        self._watch = bool(params.stop)
        self._makes_text = params.detokenize
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._text = ""

    def add(self, token_id: int, logprob: TokenLogprob | None, reason: FinishReason | None) -> bool:
        """Take one token, the last one if `reason` is given; return whether it completed a stop string."""
        self._tokens.append(token_id)
        if logprob is not None and self._logprobs is not None:
            self._logprobs.append(logprob)
        if self._watch:
            self._text += self._stream.push((token_id,), reason is FinishReason.STOP)
        if self._stream.stopped:
            self.reason = FinishReason.STOP
        elif reason is not None:
            self.end(reason)
        return self._stream.stopped

    def end(self, reason: FinishReason) -> None:
        """No more tokens come."""
        self.reason = reason
        if not self._makes_text:
            return
        if not self._watch:
            self._text = self._stream.push(self._tokens, reason is FinishReason.STOP)
        self._text += self._stream.flush()

    def output(self) -> CompletionOutput:
        """Return the whole choice."""
        reason = self.reason or FinishReason.ERROR
        ended_by: int | str | None = self._stream.stop_string or None
        if ended_by is None and reason is FinishReason.STOP and self._tokens[-1] in self._stop_reasons:
            ended_by = self._tokens[-1]
        return CompletionOutput(self._index, self._text, self._tokens, reason.value, self._logprobs, ended_by)


class BatchRun:
    """Drives `core` until a batch of requests is done. `core` must have nothing else to do meanwhile.

    num_done: requests that have all their choices. num_tokens: tokens generated so far.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        requests: Items[Request],
        grammars: GrammarCompiler,
        eos_token_ids: Collection[int],
    ) -> None:
        """Add all requests, or none: raises `InvalidRequestError` naming the first that cannot run (`prompts[3]`)."""
        self.num_done = 0
        self.num_tokens = 0
        self._core = core
        self._choices: dict[str, list[ChoiceRun]] = {}
        self._open: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        self._pooled: dict[str, list[float]] = {}
        try:
            for number, request in enumerate(requests):
                _add(core, request, number, grammars)
                self._choices[request.request_id] = _choices(request, tokenizer, eos_token_ids)
                self._open[request.request_id] = request.params.n
                if request.params.prompt_logprobs is not None:
                    self._prompt_logprobs[request.request_id] = [None]
        except BaseException:
            self.abort()
            raise

    @property
    def unfinished(self) -> bool:
        """Whether `step` has more to do."""
        return self._core.has_unfinished

    def step(self) -> None:
        """Run one engine step and take what it brings. Raises `EngineDeadError`."""
        report = self._core.step()
        self.num_tokens += len(report.token_ids)
        self._take(report)

    def abort(self) -> None:
        """End what still runs, and leave the core with nothing to do."""
        for request_id, count in self._open.items():
            if count:
                self._core.abort(request_id)
        while self._core.has_unfinished:
            self._core.step()

    def outputs(self, request_id: str) -> list[CompletionOutput]:
        """Return the choices of a request that is done."""
        return [choice.output() for choice in self._choices[request_id]]

    def prompt_logprobs(self, request_id: str) -> list[TokenLogprob | None] | None:
        """Return one per prompt token, None for the first; None when they were not asked for."""
        return self._prompt_logprobs.get(request_id)

    def pooled(self, request_id: str) -> list[float] | None:
        """Return the pooled state of a request that is done; None if the engine failed on it."""
        return self._pooled.get(request_id)

    def num_cached_tokens(self, request_id: str) -> int:
        """Return the prompt tokens of a request that is done that came from the prefix cache."""
        return self._cached.get(request_id, 0)

    def _take(self, report: StepReport) -> None:
        ended = {finish.sequence: finish.reason for finish in report.finished}
        logprobs = report.logprobs
        for told in report.prompt_logprobs:
            self._prompt_logprobs[told.sequence.request.request_id].extend(told.logprobs)
        for sequence, state in report.pooled:
            self._pooled[sequence.request.request_id] = state.tolist()
        for row, (sequence, token_id) in enumerate(zip(report.sequences, report.token_ids, strict=True)):
            request_id = sequence.request.request_id
            choice = self._choices[request_id][sequence.index]
            if choice.add(token_id, logprobs.get(row), ended.get(sequence)):
                self._core.finish_choice(request_id, sequence.index)
        for sequence, reason in ended.items():
            self._close(sequence, reason)

    def _close(self, sequence: Sequence, reason: FinishReason) -> None:
        request_id = sequence.request.request_id
        choice = self._choices[request_id][sequence.index]
        if choice.reason is None:
            choice.end(reason)
        self._cached[request_id] = self.num_cached_tokens(request_id) + sequence.num_cached_tokens
        self._open[request_id] -= 1
        self.num_done += self._open[request_id] == 0


def _choices(request: Request, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> list[ChoiceRun]:
    told = set(request.params.stop_token_ids)
    if not request.params.ignore_eos:  # as in vLLM the tokenizer's own is the end of the text, and no reason
        told = (told | set(eos_token_ids)) - {tokenizer.eos_token_id}
    streams = tokenizer.text_streams(request.params, request.prompt_token_ids)
    return [ChoiceRun(i, stream, request.params, told) for i, stream in enumerate(streams)]


def _add(core: EngineCore, request: Request, number: int, grammars: GrammarCompiler) -> None:
    """Add one request; its refusal names its place in the batch."""
    try:
        wanted = request.params.structured
        core.add(request, None if wanted is None else grammars.compile(wanted))
    except InvalidRequestError as error:
        field = f"prompts[{number}]" if error.param == "prompt" else f"sampling_params[{number}].{error.param}"
        if isinstance(error, PromptTooLongError):
            raise PromptTooLongError(f"{field}: {error}", field) from error
        raise InvalidRequestError(f"{field}: {error}", field, error.code) from error
