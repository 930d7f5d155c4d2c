"""One replica in a steady state of continuous batching, from the times of its steps alone.

Prompts come at random (Poisson), and are computed in chunks beside the sequences that decode. How many chunks wait
when a step begins is a Markov chain: what one step leaves, and what comes while it runs. Its stationary distribution
gives the mean time of a step, which is that between two tokens. Sequences follow from Little's law (Little, "A Proof
for the Queuing Formula L = lambda W", 1961). `deploy.capacity.rehearsal` runs the same load through the scheduler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.capacity.fit import GpuFit
from deploy.capacity.step_time import Chunk, Shares, Steps

Floats = NDArray[np.float64]

STATES = 64  # chunks that may wait, in the chain
TOGETHER = 16  # prompts that may begin in a step on average; of more, several are one in the chain
LOG_FACTORIALS = np.array([math.lgamma(count + 1) for count in range(STATES + 1)])
ROUNDS, EXACT = 40, 1e-3  # of the search for a number of sequences, and the relative change that ends it


@dataclass(frozen=True, slots=True)
class Flow:
    """One replica in a steady state. sequences: in it on average. rps: requests that it ends a second.

    ttft, tpot: mean seconds to the first token, without a wait for a free place, and between tokens.
    """

    sequences: float
    rps: float
    ttft: float
    tpot: float


def mean_context(input_len: int, output_len: int) -> int:
    """Return the tokens that a sequence sees on average while it decodes."""
    return input_len + (output_len + 1) // 2


@dataclass(frozen=True, slots=True)
class _Chain:
    """How steps follow each other. seconds: of a step by the chunks that wait before it. share: of steps, likewise.

    done: chunks that it computes, likewise.
    """

    seconds: Floats
    share: Floats
    done: NDArray[np.int64]

    @property
    def mean(self) -> float:
        return float(self.share @ self.seconds)


class SteadyReplica:
    """One replica that serves requests of so many tokens each."""

    def __init__(self, fit: GpuFit, input_len: int, output_len: int, shares: Shares) -> None:
        self._steps = Steps(fit)
        self._input_len, self._output_len = input_len, output_len
        self._context = mean_context(input_len, output_len)
        self._budget, self._most = fit.config.token_budget, fit.config.max_num_seqs
        self._ahead = fit.config.overlaps  # a step is launched already when a request comes
        self._shares = shares
        steps = output_len + self._ahead  # of a sequence, at least
        self._together = -(-fit.config.max_num_seqs // (steps * TOGETHER))

    def at(self, rps: float) -> Flow:
        """Return what it does when so many requests a second come at random.

        Of more than it can do, it is what it does with `max_num_seqs` sequences that decode.
        """
        decoding, chain = 0.0, self._chain(0.0, rps, None)
        for _ in range(ROUNDS):
            wanted = min(rps * (self._output_len - 1) * chain.mean, self._most)
            if abs(wanted - decoding) <= EXACT * wanted:
                break
            decoding = wanted
            chain = self._chain(decoding, rps, None)
        ttft = self._first_token(chain, decoding, rps)
        tpot = chain.mean
        return Flow(rps * (ttft + (self._output_len - 1) * tpot), rps, ttft, tpot)

    def full(self, sequences: int) -> Flow:
        """Return what it does when so many sequences are always in it: a new one takes the place of one that ends."""
        chunks, _, _ = self._chunks(sequences)
        steps = self._output_len - 1 + chunks + self._ahead
        began = sequences / steps  # in a step
        chain = self._chain(began * (self._output_len - 1), 0.0, began)
        # Prompts in a step, fewer where these fill it.
        done = float(chain.share @ chain.done) * self._together / chunks
        rps = min(began, done) / chain.mean if done else began / chain.mean
        ttft = sequences / rps - (self._output_len - 1) * chain.mean
        return Flow(sequences, rps, ttft, chain.mean)

    def _chunks(self, decoding: float) -> tuple[int, int, int]:
        """Return the chunks of a prompt, the tokens of each, and how many of them a step has room for.

        Where many prompts begin in a step, `_together` of them count as one.
        """
        room = max(int(self._budget - decoding), 1)
        chunks = -(-self._input_len // room)
        size = -(-self._input_len // chunks)
        return chunks, size, max(room // (size * self._together), 1)

    def _chain(self, decoding: float, rps: float, began: float | None) -> _Chain:
        """Return how steps follow each other. began: prompts that come in every step, None = `rps` a second do."""
        chunks, size, most = self._chunks(decoding)
        by_done = np.array(
            [self._seconds(decoding, chunks, size, count) for count in range(min(most, STATES - 1) + 1)]
        )
        waiting = np.arange(STATES)
        done = np.minimum(waiting, len(by_done) - 1)
        seconds = by_done[done]
        coming = (np.full(len(by_done), began) if began is not None else rps * by_done) / self._together
        chances = [_poisson(float(mean), (STATES - 1) // chunks) for mean in coming]
        matrix = np.zeros((STATES, STATES))
        for state in range(STATES):
            comes = chances[done[state]]
            # What would go beyond the last state stays in it.
            places = np.minimum(state - done[state] + chunks * np.arange(len(comes)), STATES - 1)
            np.add.at(matrix[state], places, comes)
        return _Chain(seconds, _stationary(matrix), done)

    def _seconds(self, decoding: float, chunks: int, size: int, count: int) -> float:
        """Return the seconds of a step that computes `count` chunks of `size`."""
        middle = Chunk((chunks - 1) * size // 2, size)  # of a prompt's chunks
        step = self._steps.step(decoding, self._context, [middle] * count * self._together)
        return step.expected(self._shares)

    def _first_token(self, chain: _Chain, decoding: float, rps: float) -> float:
        """Return the mean seconds to the first token of a request that comes at any time."""
        chunks, _, most = self._chunks(decoding)
        hit = chain.share * chain.seconds / chain.mean  # longer steps are hit more often
        half = rps * chain.seconds / 2 * chunks / self._together  # chunks that come in half of a step
        before = np.arange(STATES) - chain.done + half
        last = np.minimum(before + half + chunks, most)
        by_done = chain.seconds[: most + 1]
        more = np.maximum((before + chunks) / most - 1, 0.0)  # full steps before the one of its last chunk
        own = more * by_done[-1] + np.interp(last, np.arange(len(by_done)), by_done)
        ahead = chain.mean if self._ahead else 0.0
        return float(hit @ (chain.seconds / 2 + own)) + ahead


def _poisson(mean: float, most: int) -> Floats:
    """Return the chances of 0, 1, ... of what comes at random, `most` standing for all that are more."""
    counts = np.arange(most + 1)
    if mean <= 0:
        return np.asarray(counts == 0, float)
    chances = np.exp(counts * math.log(mean) - mean - LOG_FACTORIALS[: most + 1])
    chances[-1] += max(1.0 - float(chances.sum()), 0.0)
    return np.asarray(chances / chances.sum())


def _stationary(matrix: Floats) -> Floats:
    """Return the shares of the states of a chain. matrix: [from, to]."""
    system = matrix.T - np.eye(len(matrix))
    system[-1] = 1.0  # one of the equations follows from the others: the shares add up to one instead
    wanted = np.zeros(len(matrix))
    wanted[-1] = 1.0
    shares = np.clip(np.linalg.solve(system, wanted), 0.0, None)
    return np.asarray(shares / shares.sum())
