"""Batches of random logits and parameters, for all that draw tokens."""

import math

import numpy as np
import torch
from hypothesis import strategies as st

from engine.sampling.gumbel import RUN, Draws, row_keys
from tests.engine.sampling.test_logit_rules import bits_of
from tests.engine.sampling.test_sampler import random_logits
from tests.parity.stepping import sampling

PARAMETERS = {
    "temperature": st.sampled_from([0.0, 1e-5, 0.0001, 0.3, 1.0, 1.7, 100.0]),
    "top_k": st.sampled_from([0, 0, 1, 2, 7, 50, 63, 64, 65, 10_000]),
    "top_p": st.sampled_from([1.0, 1.0, 5e-324, 1e-6, 0.1, 0.5, 0.9, 0.999]),
    "min_p": st.sampled_from([0.0, 0.0, 5e-324, 0.01, 0.3, 1.0]),
}
VOCABULARIES = (1, 2, 50, 64, 65, 130, 321)


@st.composite
def batches(draw, vocabularies=VOCABULARIES):
    """Rows of mixed parameters: ties, steep and flat rows, -inf here and there, vocabularies of odd sizes."""
    rows, vocab = draw(st.integers(1, 4)), draw(st.sampled_from(vocabularies))
    seed = draw(st.integers(0, 2**31))
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, vocab)) * random.choice([0.01, 1, 5, 30], (rows, 1))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties, zeros of both signs
    if draw(st.booleans()):
        logits[random.random((rows, vocab)) < 0.5] = -math.inf
    values = {name: [draw(kind) for _ in range(rows)] for name, kind in PARAMETERS.items()}
    values["seeds"] = random.integers(-(2**63), 2**63 - 1, rows)
    return torch.from_numpy(logits.astype(np.float32)), sampling(rows, positions=np.arange(rows), **values)


def ruled():
    """Return logits of 100 ids and inputs with every kind of rule: row 0 must be 17, rows 3 and 4 have none left."""
    logits = torch.stack([random_logits(100, seed) for seed in range(6)])
    inputs = sampling(6, temperature=[0, 1, 1, 0, 1, 1], top_k=[0, 0, 3, 0, 0, 5], num_logprobs=2)
    inputs.allowed = {1: np.array([5, 64, 99], np.int32), 4: np.array([7], np.int32)}
    inputs.forbidden = {4: (7,), 5: (1, 2)}
    inputs.biases = {0: (np.array([17], np.int32), np.array([100], np.float32))}
    inputs.masks = lambda: (np.array([2, 3], np.int32), np.stack([bits_of([0, 31, 32, 98]), bits_of([])]))
    return logits, inputs


def draws_of(inputs):
    """Return how the ranks draw from their shares."""
    keys = row_keys(inputs.seeds, inputs.choices, inputs.positions)
    return Draws(inputs.temperature, inputs.min_p, inputs.top_k, keys)


def shares_of(logits, size):
    """Return the ranks' shares as the ranks of a group hold them."""
    width = -(-logits.shape[1] // (size * RUN)) * RUN
    padded = torch.nn.functional.pad(logits, (0, size * width - logits.shape[1]), value=-math.inf)
    return [share.contiguous() for share in padded.split(width, dim=1)]
