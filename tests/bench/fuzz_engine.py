"""Random whole batches on tiny models: each request alone in a roomy engine, and all of them together in a tight one.

    python -m tests.bench.fuzz_engine [--minutes 60] [--seed 1]
    python -m tests.bench.fuzz_engine --seed 1 --only 17,230                        these batches of that seed again

`wild_batches` makes them: all parameters at once, over all families, on one rank and two. A choice of n > 1 is drawn
alone, too, as by an engine that goes on with it. What the tight engine tells must be equal, bit by bit: tokens, ends,
log-probabilities. Only a mean of hidden states may be rounded otherwise, which depends on the chunks of its prompt. A
batch that fails is made short, and printed as Python: `Fuzz(0).differences(Batch(...))` runs it again.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
import transformers

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import CheckpointError, ConfigError, SquadronError
from engine.grammar.base import CompiledGrammar
from engine.grammar.texts import grammar_text
from engine.grammar.xgrammar_backend import Vocabulary
from engine.report import Floats, StepReport, TokenLogprob
from engine.request import FinishReason, Request
from engine.sampling_params import StructuredOutput
from engine.worker.executor_start import build_executor
from tests.bench.wild_batches import CONTEXT, Batch, Wish, source, wild_batch
from tests.parity.tiny_models import make

TIGHT = {"max_logprobs": -1, "max_model_len": CONTEXT, "dtype": "float32", "batch_invariant": True}
ROOMY = TIGHT | {
    "num_kv_blocks": 40,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
}
MOST_STEPS = 20_000
MOST_ROOMY = 4  # engines that are kept for the next batches
MOST_SHOWN = 4  # differences of a batch
MOST_TOLD = 600  # characters of one
SHORTENING = 60.0  # seconds that a batch which fails is made shorter for
END = 2  # id that the tiny models end with
WORDS = [b"", b"", b"", *(bytes([code]) for code in range(32, 127)), b'{"', b'":', b'",', b"}]", b"es", b"no", b"12"]


@dataclass(slots=True)
class Answer:
    """What an engine told of one choice. code: of an error."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    code: str = ""


@dataclass(slots=True)
class Told:
    """What an engine told of one request. prompt: by position."""

    choices: dict[int, Answer] = field(default_factory=lambda: defaultdict(Answer))
    prompt: dict[int, TokenLogprob] = field(default_factory=dict)
    pooled: Floats | None = None


class Engine:
    """An engine on one checkpoint. Integrity is checked after every step."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        executor, info = build_executor(EngineConfig(str(folder), device="cpu", **settings))
        self.core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
        self._told: dict[str, Told] = {}

    def run(self, wishes: Iterable[Wish], naps: Iterable[int] = ()) -> dict[str, Told]:
        """Grant wishes, each from its own step on; return what was told of each request."""
        self._told = defaultdict(Told)
        waiting, leaving = list(wishes), {}
        for step in range(MOST_STEPS):
            for wish in [wish for wish in waiting if wish.joins <= step]:
                waiting.remove(wish)
                self.core.add(wish.request, _grammar(wish.request.params.structured))
                leaving[wish.request.request_id] = wish
            if step in naps:
                self.core.sleep(1)
                self.core.wake_up()
            self._let_leave(leaving.values(), step)
            if not waiting and not self.core.has_unfinished:
                return self._told
            self._take(self.core.step())
            self.core.check_integrity()
        raise AssertionError(f"not done after {MOST_STEPS} steps: {self.core.stats()}")

    def _let_leave(self, wishes: Iterable[Wish], step: int) -> None:
        for wish in wishes:
            name = wish.request.request_id
            if wish.leaves == step:
                self.core.abort(name)
            for choice, most in wish.complete.items():
                answer = self._told[name].choices[choice]
                if len(answer.tokens) >= most and answer.reason is None:
                    self.core.finish_choice(name, choice)

    def _take(self, report: StepReport) -> None:
        for row, (sequence, token) in enumerate(zip(report.sequences, report.token_ids, strict=True)):
            answer = self._told[sequence.request.request_id].choices[sequence.index]
            assert answer.reason is None, "a token after the end"
            answer.tokens.append(token)
            if row in report.logprobs:
                answer.logprobs.append(report.logprobs[row])
        for scored in report.prompt_logprobs:
            prompt = self._told[scored.sequence.request.request_id].prompt
            assert prompt.keys().isdisjoint(range(scored.first, scored.first + len(scored.logprobs))), "scored twice"
            prompt.update(enumerate(scored.logprobs, scored.first))
        for sequence, state in report.pooled:
            self._told[sequence.request.request_id].pooled = state
        for finish in report.finished:
            answer = self._told[finish.sequence.request.request_id].choices[finish.sequence.index]
            assert answer.reason is None, "a second end"
            answer.reason, answer.code = finish.reason, finish.code


@cache
def _grammar(wanted: StructuredOutput | None) -> CompiledGrammar | None:
    if wanted is None:
        return None
    vocabulary = Vocabulary(WORDS + [b""] * (199 - len(WORDS)), [END])
    return vocabulary.compile(grammar_text(wanted))


class Fuzz:
    """Runs batches; a context manager, for it keeps checkpoints and engines until it is closed.

    counts: what was run. families: batches of each. wrong: number of a batch -> what was told otherwise, its source.
    """

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.families: Counter[str] = Counter()
        self.wrong: dict[int, str] = {}
        self._seed = seed
        self._folder = tempfile.TemporaryDirectory()
        self._roomy: dict[str, Engine] = {}
        self._known: dict[str, Told] = {}  # of the batch that is run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._roomy.values():
            engine.core.close()
        self._folder.cleanup()

    def run(self, numbers: Iterable[int], seconds: float, ranks: int | None = None) -> None:
        """Run the batches of these numbers, for so long."""
        until = time.monotonic() + seconds
        for number in numbers:
            if time.monotonic() > until:
                return
            batch = wild_batch(f"{self._seed}-{number}", ranks)
            self.families[batch.family] += 1
            self._known.clear()
            if found := self.differences(batch):
                print(f"batch {number} of seed {self._seed}:", *found[:MOST_SHOWN], sep="\n", flush=True)
                short = self._shrunk(batch)
                self.wrong[number] = "\n".join([*self.differences(short)[:MOST_SHOWN], source(short)])
                print(f"in short:\n{self.wrong[number]}", flush=True)

    def differences(self, batch: Batch) -> list[str]:
        """Return what the tight engine tells otherwise than the roomy one; nothing where no engine takes it so."""
        try:
            alone = self._alone(batch)
            wishes = [_resumed(wish, alone[wish.request.request_id]) for wish in batch.wishes]
            together = self._together(batch, wishes)
        except (CheckpointError, ConfigError):
            self.counts["refused"] += 1
            return []
        except (AssertionError, SquadronError, ValueError) as error:
            return [f"the tight engine failed: {type(error).__name__}: {error}"]
        found = []
        for wish in wishes:
            name = wish.request.request_id
            found += [f"{name}: {one}" for one in _differences(wish, alone[name], together[name])]
        return found

    def _alone(self, batch: Batch) -> dict[str, Told]:
        """Return what each request is told that has no company; what is known is not drawn again."""
        model = f"{batch.family} {batch.model}"
        if model not in self._roomy:
            if len(self._roomy) == MOST_ROOMY:
                self._roomy.pop(next(iter(self._roomy))).core.close()
            self._roomy[model] = Engine(self._checkpoint(batch.family), ROOMY | batch.model)
        found = {}
        for wish in batch.wishes:
            key = f"{model} {wish.request}"
            if key not in self._known:
                self._known[key] = _alone(self._roomy[model], wish.request)
            found[wish.request.request_id] = self._known[key]
        return found

    def _together(self, batch: Batch, wishes: list[Wish]) -> dict[str, Told]:
        with ExitStack() as stack:
            if batch.pieces is not None:
                stack.enter_context(patch("engine.worker.runner.logit_rows", lambda *_: batch.pieces))
            if batch.parts is not None:
                stack.enter_context(patch("engine.worker.forward.PART_TOKENS", batch.parts))
            tight = Engine(self._checkpoint(batch.family), TIGHT | batch.model | batch.cramped)
            stack.callback(tight.core.close)
            told = tight.run(wishes, batch.naps)
            stats = tight.core.stats()
            assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total, "blocks were lost"
        ran = {"batches": 1, "requests": len(wishes), "choices": sum(len(one.choices) for one in told.values())}
        self.counts.update(ran, preempted=stats.preemptions, ahead=stats.steps_ahead, cached=stats.prefix_hit_tokens)
        return told

    def _checkpoint(self, family: str) -> Path:
        folder = Path(self._folder.name) / family
        if not folder.exists():
            make(family, folder)
        return folder

    def _shrunk(self, batch: Batch) -> Batch:
        """Return the shortest batch found that still fails."""
        until = time.monotonic() + SHORTENING
        candidates = batch.shorter()
        while time.monotonic() < until and (candidate := next(candidates, None)) is not None:
            if self.differences(candidate):
                batch, candidates = candidate, candidate.shorter()
        return batch


def _alone(roomy: Engine, request: Request) -> Told:
    """Return what is told of a request none of whose choices has company."""
    told = Told()
    if request.pooling is not None:
        return roomy.run([Wish(request)])[request.request_id]
    for choice in range(request.params.n):
        single = roomy.run([Wish(replace(request, resume={choice: ()}, num_scored_tokens=0))])[request.request_id]
        told.choices[choice] = single.choices[choice]
        told.prompt = single.prompt
    return told


def _resumed(wish: Wish, alone: Told) -> Wish:
    """Return the wish with the token logs that it resumes from, none of which is complete."""
    if wish.resumes is None:
        return wish
    logs = {
        choice: tuple(answer.tokens[: min(wish.resumes, max(len(answer.tokens) - 1, 0))])
        for choice, answer in alone.choices.items()
    }
    return replace(wish, request=replace(wish.request, resume=logs))


def _differences(wish: Wish, alone: Told, together: Told) -> list[str]:
    found = []
    cut = wish.leaves is not None
    fails = {answer.code for answer in alone.choices.values() if answer.reason is FinishReason.ERROR}
    for choice, expected in alone.choices.items():
        told = together.choices[choice]
        first = len((wish.request.resume or {}).get(choice, ()))
        tokens, logprobs = expected.tokens[first:], expected.logprobs[first:]
        ends = {(expected.reason, expected.code)} | {(FinishReason.ERROR, code) for code in fails}
        if cut or choice in wish.complete:
            ends.add((FinishReason.ABORT, ""))
        count = len(told.tokens)
        # A request ends with the first of its choices that fails, however far the others are.
        whole = told.reason is expected.reason and (len(alone.choices) == 1 or not fails)
        if told.tokens != (tokens if whole else tokens[:count]):
            found.append(f"choice {choice} drew {told.tokens}, not {tokens}")
        elif told.logprobs != logprobs[:count]:
            found.append(f"choice {choice} has the log-probabilities {told.logprobs}, not {logprobs[:count]}")
        if (told.reason, told.code) not in ends:
            found.append(f"choice {choice} ended as {told.reason} {told.code}, not as {ends}")
    return [one[:MOST_TOLD] for one in found] + _prompt_differences(wish, alone, together, cut or bool(fails))


def _prompt_differences(wish: Wish, alone: Told, together: Told, may_miss: bool) -> list[str]:
    found = []
    for place, scored in alone.prompt.items():
        told = together.prompt.get(place)
        if told != scored and not (told is None and (may_miss or place < wish.request.num_scored_tokens)):
            found.append(f"prompt token {place} has {told}, not {scored}")
    if extra := together.prompt.keys() - alone.prompt.keys():
        found.append(f"prompt tokens {sorted(extra)} are scored")
    if alone.pooled is not None and not (together.pooled is None and may_miss):
        exact = wish.request.pooling == "last"
        told_state = together.pooled
        if told_state is None or not (np.array_equal if exact else np.allclose)(told_state, alone.pooled):
            found.append(f"the state is {told_state}, not {alone.pooled}"[:MOST_TOLD])
    return found


def main() -> None:
    """Run, print, and fail where something was told otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="a fresh one unless given")
    parser.add_argument("--only", type=lambda text: [int(one) for one in text.split(",")], help="numbers of batches")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="of every batch; drawn unless given")
    options = parser.parse_args()
    seed = secrets.randbits(30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    logging.getLogger("engine").setLevel(logging.CRITICAL)  # requests that cannot go on are many
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with Fuzz(seed) as fuzz:
        fuzz.run(options.only or count(), 60 * options.minutes, options.ranks)
    print(dict(fuzz.counts), f"{len(fuzz.families)} families")
    sys.exit(f"{len(fuzz.wrong)} batches were told otherwise: {sorted(fuzz.wrong)}" if fuzz.wrong else None)


if __name__ == "__main__":
    main()
