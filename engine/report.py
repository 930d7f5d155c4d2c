"""What crosses the engine's borders each step: inputs going down to the workers, results coming up.

Arrays are numpy: the same structures are packed for the workers and unpacked into tensors by the model runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.request import FinishReason, Sequence

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

NO_PAIRS: Ints = np.zeros((0, 2), np.int32)
NO_DRAWS: Ints = np.zeros((0, 5), np.int32)
NO_ENDINGS: Ints = np.zeros((0, 3), np.int32)
NO_ROWS: NDArray[np.int64] = np.zeros(0, np.int64)
NO_STATES: Ints = np.zeros(0, np.int32)


@dataclass(slots=True)
class StepInputs:
    """One step as every rank sees it: model inputs and attention metadata. All arrays are int32, flat, unpadded.

    Reference: the vllm-ascend developer guide on input preparation. `tests/engine/inputs/test_inputs.py` works an
    example.
    """

    input_ids: Ints  # [num_tokens]
    positions: Ints  # [num_tokens]
    slot_mapping: Ints  # [num_tokens]  block x block_size + offset, where each token's K/V go
    query_start_loc: Ints  # [num_reqs + 1]
    seq_lens: Ints  # [num_reqs]  computed + scheduled
    num_computed_tokens: Ints  # [num_reqs]
    block_tables: Ints  # [num_reqs, max blocks of this step]; 0 = null block
    logits_indices: Ints  # [num_logits]  rows of the hidden states whose logits are wanted, ascending
    copy_blocks: Ints  # [num_copies, 2]  (source, destination): copy-on-write, done before anything is stored
    pooled: Ints = field(default_factory=lambda: NO_PAIRS)
    # [num_pooled, 2]  (first, beyond last) rows of hidden states to be summed, ascending; given to rank 0 only
    draws: Ints = field(default_factory=lambda: NO_DRAWS)
    # [num_logits, 5]  how each rank draws from its share of the vocabulary (`sharded_draw`); [0, 5] = from all
    carried: Ints = field(default_factory=lambda: NO_PAIRS)
    # [num_carried, 2]  (row of input_ids, sample of the step before): ids that only the device knows; here they are 0
    slots: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    # [num_reqs]  row of each sequence in a block table that lives across steps; empty = 0, 1, 2, ...
    state_sources: Ints = field(default_factory=lambda: NO_STATES)
    # [num_reqs]  slot of the state cache that each recurrent state is read from, -1 = zeros; it is written to `slots`
    state_copies: Ints = field(default_factory=lambda: NO_PAIRS)
    # [num_copies, 2]  (slot, target) of recurrent states that are copied when the step has run
    table_changes: Ints | None = None
    # [2, num_changes]  places in that table, flat, and their new values (`RankTable`); None = not compared yet

    @property
    def num_tokens(self) -> int:
        """Tokens of this step over all requests."""
        return len(self.input_ids)

    @property
    def num_reqs(self) -> int:
        """Sequences in this step."""
        return len(self.seq_lens)


@dataclass(slots=True)
class PromptScores:
    """Prompt tokens whose log-probabilities are wanted, over all sequences of the step."""

    rows: Ints  # [num_scores]  row of the logits
    token_ids: Ints  # [num_scores]  the token that followed in the prompt
    num_logprobs: int  # best alternatives, the most that any wants


class Histories(NamedTuple):
    """Which tokens each sample follows, for rules that ask: they lie on the device, in the log of a row of the step.

    A choice that draws from the logits of another one has a history in the row of that one.
    """

    rows: Ints  # [num_samples]  row of the step
    starts: Ints  # [num_samples]  position of the first token of the output
    lens: Ints  # [num_samples]  tokens of prompt and output


@dataclass(slots=True)
class SamplingInputs:
    """What rank 0 needs to choose the tokens; one row per sample.

    Everything here is a function of parameters and token log, so any replica draws the same token.
    `histories` is None where no rule asks for tokens: no row has a penalty, pairs or an ending.
    `forbidden` bans tokens for a row: row -> token ids. `pairs` and `endings` ban what would complete a bad word,
    where the last token of the output is the one before that: row -> (the one before, the banned one) of words of two
    tokens, and (row, the one before, the banned one) of those whose other tokens are there.
    `allowed` bans all others: row -> token ids. `biases` adds to logits: row -> (token ids, what is added).
    These mappings are the same objects as in the step before where nothing in them changed, and so are the arrays in
    them as long as a sequence runs: what is made of them on the device can be kept.
    `masks` is asked for just before the draw, so that it may be made while the model runs: rows, and for each its
    allowed tokens as bits, the lowest first. It may wait for the step before.
    `rows` says which of the logits each sample draws from; None = the first, the second, ...
    `prompt` asks for the log-probabilities of prompt tokens.
    """

    temperature: Floats  # [num_samples]  0 = greedy
    top_k: Ints  # [num_samples]  0 = off
    top_p: Floats  # [num_samples]  1 = off
    min_p: Floats  # [num_samples]  0 = off
    seeds: NDArray[np.int64]  # [num_samples]
    choices: Ints  # [num_samples]
    positions: Ints  # [num_samples]  position of the token being drawn (prompt + outputs so far)
    repetition_penalty: Floats  # [num_samples]
    presence_penalty: Floats  # [num_samples]
    frequency_penalty: Floats  # [num_samples]
    histories: Histories | None = None
    endings: Ints = field(default_factory=lambda: NO_ENDINGS)  # [num_endings, 3]
    pairs: Mapping[int, tuple[Ints, Ints]] = field(default_factory=dict)
    forbidden: Mapping[int, Ints | tuple[int, ...]] = field(default_factory=dict)
    allowed: Mapping[int, Ints] = field(default_factory=dict)
    biases: Mapping[int, tuple[Ints, Floats]] = field(default_factory=dict)
    masks: Callable[[], tuple[Ints, Ints]] | None = None  # [num_masked], [num_masked, vocab / 32 rounded up]
    rows: Ints | None = None  # [num_samples]
    prompt: PromptScores | None = None
    num_logprobs: int = -1  # most logprobs any row wants; 0 = only the chosen token's; -1 = none
    whole_rows: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    # [num_whole]  samples of which those of the whole vocabulary are wanted, ascending

    @property
    def all_greedy(self) -> bool:
        """Whether every row takes the most likely token."""
        return not self.temperature.any()

    @property
    def changes_logits(self) -> bool:
        """Whether a rule of any row changes its logits: bias, bans, masks, penalties."""
        sets = self.forbidden or self.biases or self.allowed
        return bool(sets) or self.masks is not None or self.histories is not None


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of one step's samples, or of its prompt tokens, from the raw logits in fp32."""

    chosen: Floats  # [num]
    top_ids: Ints  # [num, k], best first
    top: Floats  # [num, k]
    ranks: Ints | None = None  # [num]  of the chosen; of prompt tokens alone
    whole: Mapping[int, Floats] = field(default_factory=dict)  # sample -> [vocab], of `SamplingInputs.whole_rows`


@dataclass(slots=True)
class StepOutputs:
    """What the model runner of rank 0 returns for one step: a run of tokens for each sample, one run after another.

    counts: the lengths of the runs, each at least 1; None = all are 1.
    failed: rows whose logits were NaN or infinite; stuck: rows to which no token was left. Their tokens, one each,
    are 0 and mean nothing, their sequences must end in an error.
    """

    token_ids: Ints  # [num_drawn]
    logprobs: Logprobs | None = None  # of each token
    failed: tuple[int, ...] = ()
    stuck: tuple[int, ...] = ()
    prompt_logprobs: Logprobs | None = None  # of `SamplingInputs.prompt`; None where there was no memory for them
    pooled: Floats | None = None  # [num_pooled, hidden]  sums over the rows of each of `StepInputs.pooled`
    channel: float = 0.0  # seconds that sending to the other ranks took
    counts: Ints | None = None  # [num_samples], which add up to num_drawn


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and the best alternatives at its position, best first.

    rank: tokens that are at least as likely, itself included; 0 = not known, as of generated tokens.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of some of a sequence's prompt tokens, in order. first: position of the first of them."""

    sequence: Sequence
    first: int
    logprobs: tuple[TokenLogprob, ...]


class BlockEvents(NamedTuple):
    """What the prefix cache gained and lost in one step, by block hash, in order of happening within each list."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    cleared: bool = False


class EngineStats(NamedTuple):
    """Figures of the engine after a step. Blocks exclude the null block."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0  # free and holding nothing worth keeping
    kv_blocks_cached: int = 0  # free to take, but findable by the prefix cache
    prefix_query_tokens: int = 0  # counters since start
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    outstanding_tokens: int = 0  # prompt tokens still to compute, over all waiting and running sequences
    steps_ahead: int = 0  # launched before the results of the step before were known; counter since start
    steps_held: int = 0  # that had to wait for them (`engine.scheduler.schedule.Hold`)
    waits_since: float | None = None  # when the sequence that waits longest began to, on the engine's clock

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that live sequences hold, 0 to 1."""
        used = self.kv_blocks_total - self.kv_blocks_free - self.kv_blocks_cached
        return used / self.kv_blocks_total if self.kv_blocks_total else 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one sequence.

    code: of an ERROR that its client sees as it is: the request itself caused it, its deadline passed, or a step
    without memory shed it. "" for any other end.
    """

    sequence: Sequence
    reason: FinishReason
    message: str = ""
    code: str = ""


@dataclass(slots=True)
class StepReport:
    """The results of one engine step. `sequences`, `token_ids` (and `logprobs` where wanted) are parallel.

    A sequence that drew several tokens stands there once for each, one after another. One that ended with a stop
    token or its length has that last token in this report as well.
    """

    step: int
    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: dict[int, TokenLogprob]  # row in `sequences` -> its log-probabilities, for those that asked
    finished: list[Finish]
    events: BlockEvents
    stats: EngineStats
    num_tokens: int = 0  # tokens computed by this step, prompt and decode
    num_sequences: int = 0  # that it was computed for
    seconds: float = 0.0  # that the step took
    executed: float = 0.0  # of these, for sending to the ranks and for the model: the others are the host's
    channel: float = 0.0  # of these again, for sending to the ranks
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[tuple[Sequence, Floats]] = field(default_factory=list)  # [hidden] each, of sequences that end


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One step as a worker rank saw it, in seconds: the wait for the driver's word, and its part of the model."""

    waited: float
    ran: float
