"""Requests, the sequences (choices) they run as, and how each of them can end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import GrammarError
from engine.sampling_params import SamplingParams

Bits = NDArray[np.int32]


class GrammarState(ABC):
    """Where one choice stands in its grammar: a function of the grammar and the tokens taken. Used by one thread."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Take the next token; False, and nothing changes, if the grammar does not allow it.

        Raises `InvalidRequestError` once the budget is used up.
        """

    @abstractmethod
    def fill(self, bits: Bits) -> None:
        """Write the tokens that may come next as bits, the lowest first. bits: [vocab / 32 rounded up].

        Raises `InvalidRequestError` once the budget is used up.
        """

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the output is complete and its end was drawn."""


Pooling = Literal["last", "mean"]


class SequenceStatus(Enum):
    """Where a sequence stands. Preempted sequences are WAITING again, their tokens kept."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are what clients see; the others never reach the wire as such."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request: everything that decides its tokens, and nothing else.

    `seed` keys the sampling noise together with the choice index and the token position. `resume` is the token log
    of a request that ran elsewhere before: choice index -> output tokens so far. When it is given, only the choices
    it names are run, each going on at its next position.

    prompt_token_ids: ids of the prompt, at least one.
    priority: smaller runs earlier (used by the `priority` policy only).
    arrival_time: seconds on the engine's clock; None = when it is added.
    cache_salt: secret that separates prefix caches (tenant); equal salts share blocks.
    pooling: instead of tokens, return the final hidden state of the last prompt token, or the mean over all of them.
    num_scored_tokens: prompt tokens whose log-probabilities were reported when it ran elsewhere before.
    deadline: monotonic seconds, on the clock of the process that holds it, after which it is ended; None = never.
    tenant: the tenant that sent it; decides no token.
    retried: whether it is not the first attempt to run it, with `resume` or without; decides no token either.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    priority: int = 0
    arrival_time: float | None = None
    cache_salt: bytes = b""
    resume: dict[int, tuple[int, ...]] | None = None
    pooling: Pooling | None = None
    num_scored_tokens: int = 0
    deadline: float | None = None
    tenant: str = ""
    retried: bool = False

    def reusable_tokens(self, num_outputs: int, num_scored: int) -> int:
        """Return how many tokens need not be computed if the cache has them, of the prompt and `num_outputs` known.

        num_scored: prompt tokens whose log-probabilities were reported. The last token is always computed: its logits
        are wanted.
        """
        most = len(self.prompt_token_ids) + num_outputs - 1
        if self.pooling == "mean":
            return 0
        if self.params.prompt_logprobs is not None and num_scored < len(self.prompt_token_ids):
            return min(most, max(num_scored - 1, 0))
        return most


class TokenCounts(Protocol):
    """The columns of the running sequences' tables that a sequence reads."""

    num_tokens: NDArray[np.int32]
    num_computed: NDArray[np.int32]

    def held_blocks(self, slot: int) -> list[int]:
        """Return its block table."""
        ...


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The life of a sequence in this engine, from its arrival to its last token; the three parts are all of it.

    queue: until it first ran, what its output must match being compiled included. prefill: until it drew its first
    token here, or its pooled state was whole. decode: until the last step that ran while it lived, time that it
    waited after a preemption included.
    """

    queue: float
    prefill: float
    decode: float

    @property
    def inference(self) -> float:
        """From when it first ran."""
        return self.prefill + self.decode


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One choice of a request. Owned by the scheduler; its tokens live in row `slot` of the token table.

    slot: row in the tables of the running sequences, -1 while it has none. tables: those tables, while it has one.
    num_prompt_tokens: prompt length. num_known: prompt + output so far, of one that has no slot.
    num_cached_tokens: prompt tokens that its request found in the prefix cache; 0 for all choices but the first.
    resume_tokens: output tokens known when the sequence is (re)admitted: the log of a preempted or migrated choice.
    stop_token: the end-of-sequence or stop id that ended it, None for any other end.
    num_scored_tokens: prompt tokens whose log-probabilities were reported, where they are wanted.
    pooled: sum of the hidden states that are to be averaged, [hidden] in fp64; None before the first.
    grammar: where its output stands in the grammar that it must match, of which it has taken `num_matched` tokens.
    mismatch: why it could not take the last of them, or say what may come next.
    order: smaller is admitted earlier and preempted later; unique. number: of its request, likewise unique.
    queued_at / started_at / first_token_at / ended_at: when it began to wait (again, after a preemption), first ran,
        drew its first token here, and last was in a step, on the engine's clock; None before.
    """

    request: Request
    index: int
    num_prompt_tokens: int
    num_known: int
    slot: int = -1
    tables: TokenCounts | None = None
    num_cached_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    resume_tokens: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    preemptions: int = 0
    arrival_time: float = 0.0
    order: tuple[float, ...] = ()
    number: int = 0
    num_scored_tokens: int = 0
    pooled: NDArray[np.float64] | None = None
    grammar: GrammarState | None = None
    num_matched: int = 0
    mismatch: Exception | None = None
    queued_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt + output so far, those included that a step in flight draws."""
        return self.num_known if self.tables is None else int(self.tables.num_tokens[self.slot])

    @property
    def num_computed_tokens(self) -> int:
        """Positions whose K/V are in the cache, or will be after the steps in flight."""
        return 0 if self.tables is None else int(self.tables.num_computed[self.slot])

    @property
    def block_table(self) -> list[int]:
        """Physical block numbers in logical order; a copy."""
        return [] if self.tables is None else self.tables.held_blocks(self.slot)

    @property
    def phases(self) -> PhaseTimes | None:
        """Its phases once it has ended; None before, and of one that drew no token."""
        started, first, ended = self.started_at, self.first_token_at, self.ended_at
        if started is None or first is None or ended is None:
            return None
        return PhaseTimes(started - self.arrival_time, first - started, ended - first)

    @property
    def is_first(self) -> bool:
        """Whether it is the first of its request's choices that run here, which answers for what they share."""
        resume = self.request.resume
        return self.index == (0 if resume is None else min(resume))

    @property
    def reads_prompt(self) -> bool:
        """Whether something is wanted of its prompt beside the first token: log-probabilities or a pooled state."""
        return self.request.pooling is not None or self.request.params.prompt_logprobs is not None

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens that need not be computed if the cache has them."""
        return self.request.reusable_tokens(self.num_output_tokens, self.num_scored_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    def match(self, token_id: int, number: int) -> None:
        """Let the grammar, if there is one, take output token `number`, counted from 1; again, and nothing happens.

        Raises what it raised then, `GrammarError` where the token is not allowed.
        """
        if self.grammar is not None and number > self.num_matched:
            self.num_matched = number
            self.mismatch = _mismatch(self.grammar, token_id)
        if self.mismatch is not None:
            raise self.mismatch

    def known_tokens(self, first: int, beyond: int) -> tuple[int, ...]:
        """Return tokens of a sequence that waits, by position: of its prompt, and of the output from before."""
        prompt = self.num_prompt_tokens
        outputs = self.resume_tokens[max(first - prompt, 0) : max(beyond - prompt, 0)]
        return (*self.request.prompt_token_ids[first:beyond], *outputs)


def _mismatch(grammar: GrammarState, token_id: int) -> Exception | None:
    """Have `grammar` take a token; return why it could not."""
    try:
        taken = grammar.accept(token_id)
    except Exception as error:
        return error
    return None if taken else GrammarError(f"token {token_id} was drawn although the grammar does not allow it")
