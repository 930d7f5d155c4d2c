"""Draws tokens on a GPU: few launches, few passes over the logits, and no word with the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from engine.device.gpu import upload
from engine.kernels import triton_draw
from engine.kernels.triton_launch import ceil_div, next_power_of_2
from engine.report import SamplingInputs
from engine.sampling.gumbel import Draws, TokenDraws, row_keys
from parallel.group import Group

RUN: int = triton_draw.RUN.value
RUNS = 64  # runs that a program looks at together: 4,096 logits
RUNS_AT_ONCE = 512  # runs that `draw_by_gumbel` reads at once
FORBIDDEN_IDS = 4096  # ids that a program of `forbid` looks at
WARPS = 8
TINY = np.finfo(np.float32).tiny


class TritonDraws(TokenDraws):
    """Draws what `engine.sampling.sampler` draws on a CPU, from the same noise.

    One pass over the logits leaves the peak and the mass of each run of 64 ids. Greedy rows and rows without filters
    need little more: a token is drawn from the runs, then from one run. With filters the peaks tell which runs can
    hold what is left, and only those are looked at again: the k best lie in the k runs with the best peaks. The
    thresholds are found digit by digit in the order of floats, exactly and without sorting; a nearly flat row with
    top-p alone, where all runs stay in, takes 16 more passes.

    A row is worked on by itself, in an order that depends on the vocabulary alone: its token is the same in any
    company and on any GPU of one kind. Between GPU and CPU the noise is the same in fp64 up to the last place of a
    logarithm, while masses are sums in fp32 in another order: a token differs where two runs, or the mass and top-p,
    are within about 1e-6 of each other.
    """

    @override
    def forbid(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        vocab = logits.shape[1]
        grid = (len(rows), ceil_div(vocab, FORBIDDEN_IDS))
        triton_draw.forbid[grid](
            logits, rows, bits, logits.stride(0), vocab, bits.shape[1], BLOCK=FORBIDDEN_IDS, num_warps=WARPS
        )

    @override
    def draw(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        rows = _Rows.of(logits, inputs)
        sizes = (logits.stride(0), rows.vocab, rows.num_runs)
        block = next_power_of_2(rows.num_runs)
        triton_draw.scan[len(logits), ceil_div(rows.num_runs, RUNS)](
            logits, rows.temperature, rows.peaks, rows.masses, *sizes, RUNS=RUNS, num_warps=WARPS
        )
        if rows.filters is not None:
            _restrict(logits, rows, rows.filters, block)
        tokens = torch.empty_like(rows.temperature, dtype=torch.int32)
        triton_draw.draw_by_gumbel[len(logits),](
            logits, rows.temperature, rows.keys, rows.peaks, rows.masses, rows.leasts, tokens, *sizes, 0, rows.vocab,
            int(rows.filters is not None), BLOCK=block, RUNS_AT_ONCE=RUNS_AT_ONCE, num_warps=WARPS,
        )  # fmt: skip
        return tokens

    @override
    def draw_share(self, own: Tensor, draws: Draws, vocab: int, group: Group) -> Tensor:
        if ((draws.temperature != 0) & ((draws.top_k > 0) | (draws.min_p > 0))).any():
            raise ValueError("top_k and min_p are looked for in whole rows of logits on a GPU, not in shares")
        # Of each run of 64 logits the ranks exchange 8 bytes; the one that has the run that wins has the id.
        count, share = own.shape
        own_runs, num_runs = share // RUN, ceil_div(vocab, RUN)
        sent_keys, sent_temperature = upload((draws.keys, draws.temperature), own.device)
        mine = torch.zeros(2, count, own_runs, device=own.device)
        triton_draw.scan[count, ceil_div(own_runs, RUNS)](
            own, sent_temperature, mine[0], mine[1], own.stride(0), share, own_runs, RUNS=RUNS, num_warps=WARPS
        )
        peaks, masses = group.all_gather(mine)[:, :, :num_runs].contiguous()
        tokens = torch.empty(count, dtype=torch.int32, device=own.device)
        triton_draw.draw_by_gumbel[count,](
            own, sent_temperature, sent_keys, peaks, masses, peaks, tokens, own.stride(0), vocab, num_runs,
            group.rank * share, share, 0, BLOCK=next_power_of_2(num_runs), RUNS_AT_ONCE=RUNS_AT_ONCE, num_warps=WARPS,
        )  # fmt: skip
        return group.all_gather(tokens[:, None]).amax(dim=-1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the kernels read and write for each row; the first dimension of every tensor is num_rows."""

    vocab: int
    num_runs: int
    keys: Tensor  # int64
    temperature: Tensor
    filters: tuple[Tensor, ...] | None  # log of min-p, top-k, top-p; None = no row is filtered
    peaks: Tensor  # [.., num_runs] fp32
    masses: Tensor  # [.., num_runs] fp32
    leasts: Tensor  # least logit / temperature that may be drawn

    @classmethod
    def of(cls, logits: Tensor, inputs: SamplingInputs) -> _Rows:
        num_rows, vocab = logits.shape
        num_runs = ceil_div(vocab, RUN)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(inputs.min_p)
        top_k = np.where(inputs.top_k < vocab, inputs.top_k, 0).clip(min=0).astype(np.int32)
        filtered = ((top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0)) & (inputs.temperature > 0)
        keys = row_keys(inputs.seeds, inputs.choices, inputs.positions)
        # Of no mass at all there is no least logit: a top-p too small for fp32 is 0 there.
        filters = (log_min_p, top_k, np.maximum(inputs.top_p, TINY)) if filtered.any() else ()
        moved = upload((keys, inputs.temperature, *filters), logits.device)
        peaks = torch.empty(num_rows, num_runs, device=logits.device)
        return cls(
            vocab, num_runs, moved[0], moved[1], tuple(moved[2:]) or None,
            peaks, torch.empty_like(peaks), torch.empty_like(moved[1]),
        )  # fmt: skip


def _restrict(logits: Tensor, rows: _Rows, filters: tuple[Tensor, ...], block: int) -> None:
    """Leave in `rows.masses` what the filters leave, and in `rows.leasts` the thresholds."""
    survivors = torch.empty_like(rows.masses, dtype=torch.int32)
    counts, totals = torch.empty_like(rows.leasts, dtype=torch.int32), torch.empty_like(rows.leasts)
    shared = (rows.temperature, *filters, rows.peaks, rows.masses, survivors, counts, rows.leasts, totals)
    triton_draw.bound[len(logits),](*shared, rows.num_runs, BLOCK=block, num_warps=WARPS)
    triton_draw.restrict[len(logits),](
        logits, *shared, logits.stride(0), rows.vocab, rows.num_runs, BLOCK=block, RUNS=RUNS, num_warps=WARPS
    )
