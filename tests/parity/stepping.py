"""Test helper: lays sequences out in blocks by hand and runs them through a `ModelRunner`, a step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.report import Histories, SamplingInputs, StepInputs, StepOutputs
from engine.sampling import sampler
from engine.sampling.device_rules import DeviceRules, TokenLogs
from engine.sampling.gumbel import TokenDraws
from engine.sampling.sampler import DeviceOutputs
from engine.worker.step_outputs import on_host


class Given(SamplingInputs):
    """What a step samples with. logs: the tokens of its rows."""

    logs: TokenLogs | None = None


def sampling(rows: int, prompt_ids=None, output_ids=None, **values) -> Given:
    """Greedy sampling of `rows` rows, with some arrays given otherwise (scalars are repeated).

    prompt_ids, output_ids: [rows, most], -1 where there is none.
    """

    def array(name, default, dtype):
        return np.broadcast_to(np.asarray(values.pop(name, default), dtype), (rows,)).copy()

    known = {
        "temperature": array("temperature", 0, np.float32),
        "top_k": array("top_k", 0, np.int32),
        "top_p": array("top_p", 1, np.float32),
        "min_p": array("min_p", 0, np.float32),
        "seeds": array("seeds", 0, np.int64),
        "choices": array("choices", 0, np.int32),
        "positions": array("positions", 0, np.int32),
        "repetition_penalty": array("repetition_penalty", 1, np.float32),
        "presence_penalty": array("presence_penalty", 0, np.float32),
        "frequency_penalty": array("frequency_penalty", 0, np.float32),
    }
    given = Given(**known, **values)
    if prompt_ids is not None:
        follow(given, prompt_ids, prompt_ids[:, :0] if output_ids is None else output_ids)
    return given


def follow(given: Given, prompts, outputs) -> None:
    """Lay the tokens that the rows follow out in blocks of four, scattered."""
    histories = [row[row >= 0].tolist() for row in np.concatenate([prompts, outputs], axis=1)]
    width = max(1, -(-max(map(len, histories)) // 4))
    tables = np.random.default_rng(0).permutation(len(histories) * width).reshape(-1, width)
    ids = np.full((tables.size, 4), -7, np.int32)
    for table, history in zip(tables, histories, strict=True):
        ids[table] = as_ints([*history, *[-7] * (4 * width - len(history))]).reshape(width, 4)
    starts = (prompts >= 0).sum(axis=1)
    rows = np.arange(len(histories), dtype=np.int32)
    given.histories = Histories(rows, as_ints(starts), as_ints([len(history) for history in histories]))
    given.logs = TokenLogs(torch.from_numpy(ids), torch.from_numpy(tables.astype(np.int32)), rows)


def sample(logits: torch.Tensor, inputs: Given, draws: TokenDraws | None = None) -> DeviceOutputs:
    """Sample as a step does whose rows are `inputs.logs`."""
    logs = inputs.logs
    if logs is not None:
        logs = TokenLogs(logs.ids.to(logits.device), logs.tables.to(logits.device), logs.rows)
    return sampler.sample(logits, inputs, draws, DeviceRules(logs))


def drawn(logits: torch.Tensor, inputs: Given) -> StepOutputs:
    """Sample on the CPU."""
    return on_host(sample(logits, inputs))


def as_ints(values) -> np.ndarray:
    return np.asarray(values, np.int32)


@dataclass
class Sequence:
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # one row per sampled token, of steps run eagerly


class Stepper:
    """Runs sequences on a runner. Blocks are handed out in a scattered order, so that nothing lies side by side."""

    def __init__(self, runner):
        self.runner = runner
        self.block_size = runner.config.block_size
        free = np.arange(1, runner.config.num_kv_blocks)
        self.free = np.random.default_rng(0).permutation(free).tolist()
        self.copies: list[tuple[int, int]] = []
        self._logits: torch.Tensor | None = None  # a graph computes them without a word
        plain = runner.model.logits

        def kept(hidden):
            self._logits = plain(hidden)
            return self._logits.clone()

        runner.model.logits = kept

    def step(self, scheduled: dict[int, int], sequences: list[Sequence], **values) -> np.ndarray:
        """Compute `scheduled[i]` more tokens of sequence i; those that are complete get a sampled token appended."""
        chosen = [sequences[i] for i in scheduled]
        inputs = self.inputs(chosen, list(scheduled.values()))
        complete = [s for s, n in zip(chosen, scheduled.values(), strict=True) if s.computed + n == len(s.tokens)]
        positions = [len(s.tokens) for s in complete]
        self._logits = None
        outputs = self.runner.execute(inputs, sampling(len(complete), positions=positions, **values))
        for sequence, count in zip(chosen, scheduled.values(), strict=True):
            sequence.computed += count
        for row, sequence in enumerate(complete):
            sequence.tokens.append(int(outputs.token_ids[row]))
            if self._logits is not None:
                sequence.logits.append(self._logits[row].float())
        return outputs

    def inputs(self, chosen: list[Sequence], counts: list[int]) -> StepInputs:
        ids, positions, slots, logits = [], [], [], []
        for sequence, count in zip(chosen, counts, strict=True):
            end = sequence.computed + count
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            where = np.arange(sequence.computed, end)
            ids += sequence.tokens[sequence.computed : end]
            positions += where.tolist()
            slots += (np.asarray(sequence.blocks)[where // self.block_size] * self.block_size).tolist()
            slots[-count:] = (np.asarray(slots[-count:]) + where % self.block_size).tolist()
            if end == len(sequence.tokens):
                logits.append(len(ids) - 1)
        widest = max(len(s.blocks) for s in chosen)
        tables = [s.blocks + [0] * (widest - len(s.blocks)) for s in chosen]
        copies, self.copies = self.copies, []
        return StepInputs(
            input_ids=as_ints(ids),
            positions=as_ints(positions),
            slot_mapping=as_ints(slots),
            query_start_loc=as_ints([0, *np.cumsum(counts)]),
            seq_lens=as_ints([s.computed + n for s, n in zip(chosen, counts, strict=True)]),
            num_computed_tokens=as_ints([s.computed for s in chosen]),
            block_tables=as_ints(tables),
            logits_indices=as_ints(logits),
            copy_blocks=as_ints(copies).reshape(-1, 2),
        )

    def generate(self, prompts: list[list[int]], count: int) -> list[Sequence]:
        """Run prompts to the end together, greedily."""
        sequences = [Sequence(list(prompt)) for prompt in prompts]
        self.step({i: len(s.tokens) for i, s in enumerate(sequences)}, sequences)
        for _ in range(count - 1):
            self.step(dict.fromkeys(range(len(sequences)), 1), sequences)
        return sequences

    def release(self, sequences: list[Sequence]) -> None:
        """Give the blocks back."""
        for block in {block for sequence in sequences for block in sequence.blocks}:
            self.free.append(block)
