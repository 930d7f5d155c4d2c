"""Draws tokens on a CPU, and scores them, by draw.c and score.c.

That is a pass over the logits, and a second one where top-p or log-probabilities want the mass of a row.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.compiler import load_library
from engine.report import SamplingInputs
from engine.sampling import logit_rules
from engine.sampling.gumbel import Draws, TokenDraws, row_keys
from engine.sampling.sharded_draw import draw_shares
from parallel.group import Group

SOURCES = ("draw.c", "score.c")


def draw_library() -> ctypes.CDLL | None:
    """Return the library that draws, the same for all models, or None where it cannot be compiled."""
    library = load_library(SOURCES, {})
    if library is not None:
        library.draw_room.argtypes = (c_int64,) * 2
        library.draw_room.restype = c_int64
        library.draw_tokens.argtypes = (c_void_p, *(c_int64,) * 4, *(c_void_p,) * 7, c_int64)
        shares = (c_void_p, *(c_int64,) * 4, *(c_void_p,) * 4, c_int64, *(c_void_p,) * 3, c_int64)
        library.draw_from_shares.argtypes = shares
        library.score_tokens.argtypes = (c_void_p, *(c_int64,) * 4, c_void_p, c_int64, *(c_void_p,) * 5, c_int64)
        for function in (library.draw_tokens, library.draw_from_shares, library.score_tokens):
            function.restype = None
    return library


class NativeDraws(TokenDraws):
    """Draws what `engine.sampling.sampler` draws, from the same noise; for one thread at a time.

    Weights are those of fp32 up to the last places of an exponential, and sums are in another order than torch's: a
    token differs where two runs, or the mass and top-p, are within about 1e-6 of each other.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._room = torch.empty(0)

    @override
    def forbid(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        logit_rules.forbid(logits, rows, bits)

    @override
    def draw(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int32)
        temperature = np.ascontiguousarray(inputs.temperature)
        keys = row_keys(inputs.seeds, inputs.choices, inputs.positions)
        filtered = ((inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0)) & (temperature > 0)
        filters: list[np.ndarray] = []
        if filtered.any():
            with np.errstate(divide="ignore"):
                filters = [np.ascontiguousarray(each) for each in (np.log(inputs.min_p), inputs.top_k, inputs.top_p)]
        given = _readable(logits)
        self._library.draw_tokens(
            *_placed(given), rows, vocab, temperature.ctypes.data, keys.ctypes.data,
            *(each.ctypes.data for each in filters or ()), *(None,) * (3 - len(filters)),
            tokens.data_ptr(), self._room_for(vocab, bool(filters)), self._threads,
        )  # fmt: skip
        return tokens

    @override
    def draw_share(self, own: Tensor, draws: Draws, vocab: int, group: Group) -> Tensor:
        return draw_shares(own, draws, vocab, group, self.race)

    def race(
        self, own: Tensor, temperature: Tensor, most: Tensor, least: Tensor | None, keys: Tensor, first_run: int
    ) -> tuple[Tensor, Tensor]:
        """See `engine.sampling.sharded_draw.Race`."""
        rows, share = own.shape
        scores, columns = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.int64)
        given, mosts = _readable(own), most.contiguous()
        leasts = None if least is None else least.contiguous()
        self._library.draw_from_shares(
            *_placed(given), rows, share, temperature.data_ptr(), keys.data_ptr(), mosts.data_ptr(),
            None if leasts is None else leasts.data_ptr(), first_run, scores.data_ptr(), columns.data_ptr(),
            self._room_for(share, False), self._threads,
        )  # fmt: skip
        return scores, columns

    @override
    def score(
        self, logits: Tensor, tokens: Tensor, count: int, ranked: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        rows, vocab = logits.shape
        count = min(count, vocab)
        given, wanted = _readable(logits), tokens.contiguous()
        chosen, top, ids = torch.empty(rows), torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int32)
        ranks = torch.empty(rows, dtype=torch.int32) if ranked else None
        self._library.score_tokens(
            *_placed(given), rows, vocab, wanted.data_ptr(), count, chosen.data_ptr(), top.data_ptr(), ids.data_ptr(),
            None if ranks is None else ranks.data_ptr(), self._room_for(vocab, True), self._threads,
        )  # fmt: skip
        return chosen, ids, top, ranks

    def _room_for(self, vocab: int, filtered: bool) -> int:
        """Return where the threads work, kept from one call to the next: memory is dear to get."""
        wanted = self._library.draw_room(vocab, int(filtered)) * self._threads
        if self._room.numel() < wanted:
            self._room = torch.empty(wanted)
        return self._room.data_ptr()


def _readable(logits: Tensor) -> Tensor:
    """Return the logits themselves where C can read them, a copy in fp32 otherwise."""
    if logits.dtype in (torch.float32, torch.bfloat16) and (logits.shape[1] == 1 or logits.stride(1) == 1):
        return logits
    return logits.float().contiguous()


def _placed(logits: Tensor) -> tuple[int, int, int]:
    """Return where the logits begin, how many bytes their rows lie apart, and whether they are in 16 bits."""
    return (
        logits.data_ptr(),
        logits.stride(0) * logits.element_size(),
        int(logits.dtype is torch.bfloat16),
    )
