"""An engine core of hashed tokens: prefills in chunks, draws one token a step for each sequence, and ends them."""

from __future__ import annotations

from collections.abc import Callable

from cluster.simulator.engine import FIRST_TOKEN
from engine.core import EngineCore
from engine.events import Began, Idle, OnEvent
from engine.grammar.base import CompiledGrammar
from engine.kv.block_manager import NO_EVENTS
from engine.report import EngineStats, Finish, StepReport
from engine.request import FinishReason, Request, Sequence
from engine.step import OnBegin

BASE, PER_SEQUENCE = 0.02, 0.001  # seconds of a step
MASK = 2**64 - 1


def hashed_token(version: int, seed: int, choice: int, position: int, vocab_size: int) -> int:
    """Return the token that a model version draws at a position, the same on every replica."""
    mixed = (seed + 7919 * choice + 104729 * version) * 0x9E3779B97F4A7C15 + position & MASK
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & MASK
    return FIRST_TOKEN + (mixed >> 32) % (vocab_size - FIRST_TOKEN)


class StubCore(EngineCore):
    """What a `ReplicaCore` needs of an engine, at a few microseconds a token.

    chunk: prompt tokens that a step computes of each sequence. version: of the model; each draws other tokens.
    last_step: seconds that the last step takes.
    """

    def __init__(
        self, clock: Callable[[], float], vocab_size: int, max_num_seqs: int, chunk: int, version: int, blocks: int
    ) -> None:
        self.clock = clock
        self.last_step = 0.0
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._chunk = chunk
        self._version = version
        self._num_blocks = blocks
        self._sequences: list[Sequence] = []  # in order of arrival
        self._left: dict[Sequence, int] = {}  # tokens of its prompt that are not computed yet
        self._num_steps = self._generated = self._computed = 0
        self._on_begin: OnBegin = lambda _: None
        self._emit: OnEvent = lambda _: None

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do something."""
        return bool(self._sequences)

    @property
    def is_sleeping(self) -> bool:
        """Never: it has no memory to give back."""
        return False

    @property
    def request_ids(self) -> set[str]:
        """Of what runs or waits."""
        return {sequence.request.request_id for sequence in self._sequences}

    def call_on_begin(self, listener: OnBegin) -> None:
        """See `EngineCore.call_on_begin`."""
        self._on_begin = listener

    def call_on_event(self, listener: OnEvent) -> None:
        """See `EngineCore.call_on_event`; there are no events but of idle time."""
        self._emit = listener
        listener(Began(self.clock(), 1, self._num_blocks))

    def emit_time(self) -> None:
        """See `EngineCore.emit_time`."""
        self._emit(Idle(self.clock()))

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        """Take a request."""
        resume = dict.fromkeys(range(request.params.n), ()) if request.resume is None else request.resume
        for choice, log in resume.items():
            length = len(request.prompt_token_ids)
            sequence = Sequence(request, choice, length, length + len(log))
            self._sequences.append(sequence)
            self._left[sequence] = length + len(log)

    def abort(self, request_id: str) -> bool:
        """End a request; return whether it was there."""
        return self._keep([one for one in self._sequences if one.request.request_id != request_id])

    def finish_choice(self, request_id: str, choice: int) -> bool:
        """End a choice; return whether it was there."""
        return self._keep(
            [one for one in self._sequences if (one.request.request_id, one.index) != (request_id, choice)]
        )

    def step(self) -> StepReport:
        """Compute a chunk of each prompt, and a token of each other sequence."""
        running = self._sequences[: self._max_num_seqs]
        begun = {one.request.request_id: one.request for one in running if one.started_at is None}
        if begun:
            self._on_begin(list(begun.values()))
        drew: list[Sequence] = []
        tokens: list[int] = []
        finished: list[Finish] = []
        for sequence in running:
            if sequence.started_at is None:
                sequence.started_at = self.clock()
            self._left[sequence] -= self._chunk
            if self._left[sequence] > 0:
                continue
            self._left[sequence] = 0
            request = sequence.request
            drew.append(sequence)
            tokens.append(
                hashed_token(self._version, request.seed, sequence.index, sequence.num_known, self._vocab_size)
            )
            sequence.num_known += 1
            if sequence.num_output_tokens == request.params.max_tokens:
                sequence.finish_reason = FinishReason.LENGTH
                finished.append(Finish(sequence, FinishReason.LENGTH))
        ended = {finish.sequence for finish in finished}
        if ended:
            self._keep([one for one in self._sequences if one not in ended])
        self._num_steps += 1
        self._generated += len(tokens)
        self.last_step = BASE + PER_SEQUENCE * len(running)
        return StepReport(
            self._num_steps,
            drew,
            tokens,
            {},
            finished,
            NO_EVENTS,
            self.stats(),
            num_tokens=len(running),
            num_sequences=len(running),
        )

    def stats(self) -> EngineStats:
        """Return the figures now."""
        running = min(len(self._sequences), self._max_num_seqs)
        held = min(self._num_blocks, len(self._sequences))
        return EngineStats(
            running,
            len(self._sequences) - running,
            kv_blocks_total=self._num_blocks,
            kv_blocks_free=self._num_blocks - held,
            generated_tokens=self._generated,
            outstanding_tokens=sum(self._left.values()),
        )

    def close(self) -> None:
        """Run nothing more."""
        self._keep([])

    def _keep(self, sequences: list[Sequence]) -> bool:
        """Keep these alone; return whether there were others."""
        fewer = len(sequences) < len(self._sequences)
        self._sequences = sequences
        self._left = {one: self._left[one] for one in sequences}
        return fewer
