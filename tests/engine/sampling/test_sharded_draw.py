"""Ranks that draw from their shares of the vocabulary draw what a sampler draws from the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers.embedding import ParallelLMHead
from engine.models.decoder import DecoderLM
from engine.report import PromptScores
from engine.sampling.gumbel import RUN
from engine.sampling.sharded_draw import MOST, draw_apart, draw_shares, unpack_draws
from engine.sampling.sharded_draw import pack_draws as pack_for
from parallel.parameter import TensorSource
from parallel.sharding import padded_vocab
from tests.engine.thread_group import ThreadGroup, on_ranks
from tests.parity.stepping import sample, sampling


def pack_draws(inputs, device="cpu"):
    return pack_for(inputs, torch.device(device))


@pytest.fixture(autouse=True)
def any_row_pays(monkeypatch):
    monkeypatch.setattr("engine.sampling.sharded_draw.FEWEST", 1)


def apart(logits, inputs, size):
    """Return the tokens that each rank ends with."""
    vocab = logits.shape[1]
    width = padded_vocab(vocab, size, RUN)
    shares = torch.nn.functional.pad(logits, (0, width - vocab), value=float("-inf")).chunk(size, dim=1)
    packed = pack_draws(inputs)
    assert len(packed) == len(logits)
    draws = unpack_draws(packed)
    return on_ranks(
        size, lambda group: draw_shares(shares[group.rank].clone().contiguous(), draws, vocab, group).tolist()
    )


def whole(logits, inputs):
    return sample(logits.clone(), inputs).token_ids.tolist()


def random_logits(rng, rows, vocab, levels):
    """Return logits of so many different values, 0 for hardly any two alike."""
    logits = rng.standard_normal((rows, vocab)) * 3
    if levels:
        logits = np.round(logits * levels / 6) * (6 / levels)
    return torch.from_numpy(logits.astype(np.float32))


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([5, 63, 64, 512, 1000, 2049]),
    st.sampled_from([0, 1, 8, 400]),
    st.integers(1, 6),
    st.booleans(),
)
def test_the_tokens_are_those_of_the_whole_vocabulary(seed, size, vocab, levels, rows, poisoned):
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, rows, vocab, levels)
    if poisoned:
        where = rng.integers(0, rows), rng.integers(0, vocab)
        logits[where] = float(rng.choice([np.nan, np.inf, -np.inf]))
    inputs = sampling(
        rows,
        temperature=rng.choice([0, 0.3, 0.7, 1, 1.7], rows),
        top_k=rng.choice([0, 1, 2, 5, 50, MOST], rows),
        min_p=rng.choice([0, 0.05], rows),
        seeds=rng.integers(-(2**63), 2**63 - 1, rows),
        choices=rng.integers(0, 3, rows),
        positions=rng.integers(1, 1000, rows),
    )
    expected = whole(logits, inputs)
    assert apart(logits, inputs, size) == [expected] * size


def test_equal_logits_all_stay_in_the_race_and_the_greedy_take_the_first():
    logits = torch.zeros(400, 512)
    inputs = sampling(400, temperature=1.0, top_k=2, seeds=np.arange(400))
    (tokens, again) = apart(logits, inputs, 2)
    assert tokens == again == whole(logits, inputs)
    assert len({token // 256 for token in tokens}) == 2
    logits[:, 300:] = 1
    assert apart(logits, sampling(400), 2)[0] == [300] * 400


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_drawn_from_16_bits_is_what_would_be_from_32(temperature):
    logits = torch.randn(20, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    inputs = sampling(20, temperature=temperature, top_k=5, seeds=np.arange(20))
    assert apart(logits, inputs, 2) == apart(logits.float(), inputs, 2)


def test_rows_without_any_token_fail():
    logits = torch.full((2, 128), float("-inf"))
    logits[0, 100] = 1
    for temperature in (0.0, 1.0):
        assert apart(logits, sampling(2, temperature=temperature, top_k=3), 2) == [[100, -1]] * 2


def test_a_row_travels_in_some_bytes():
    rows, vocab = 16, 8192
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))

    def sent(group: ThreadGroup, inputs) -> float:
        draws = unpack_draws(pack_draws(inputs))
        draw_shares(logits.chunk(2, dim=1)[group.rank].clone().contiguous(), draws, vocab, group)
        return group.sent / rows

    assert on_ranks(2, lambda group: sent(group, sampling(rows))) == [8, 8]
    assert on_ranks(2, lambda group: sent(group, sampling(rows, temperature=1.0))) == [24, 24]
    assert on_ranks(2, lambda group: sent(group, sampling(rows, temperature=1.0, top_k=50))) == [224, 224]


class OneHead:
    """As much of a model as logits need."""

    def __init__(self, weight, group, cap):
        self.group, self.softcap, self.logit_divisor = group, cap, 1.0
        self.head = ParallelLMHead(weight.shape[1], weight.shape[0], False, group, torch.float32)
        self.head.weight.load(TensorSource(weight))
        self.vocab_size = weight.shape[0]
        self.norm = torch.nn.Identity()

    logits, own_logits, _capped = DecoderLM.logits, DecoderLM.own_logits, DecoderLM._capped


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("vocab", [37, 1000])
def test_a_head_draws_what_its_gathered_logits_would(size, cap, vocab):
    generator = torch.Generator().manual_seed(vocab)
    weight = torch.randn(vocab, 16, generator=generator)
    weight[:, 0] = -2  # all logits are far below 0: padding that were not hidden would be the best
    hidden = torch.randn(7, 16, generator=generator)
    hidden[:, 0] = 20
    top_k = np.array([0, 1, 4, 0, 30, 64, 2])
    inputs = sampling(7, temperature=(top_k > 0) * 0.8, top_k=top_k, seeds=np.arange(7))

    def act(group):
        model = OneHead(weight, group, cap)
        return model.logits(hidden), draw_apart(model, hidden, pack_draws(inputs), 3).tolist()

    for logits, tokens in on_ranks(size, act):
        assert tokens == whole(logits, inputs)


@pytest.mark.parametrize(
    "values",
    [
        {"num_logprobs": 0},
        {"prompt": PromptScores(np.zeros(1, np.int32), np.zeros(1, np.int32), 0)},
        {"forbidden": {0: (1,)}},
        {"allowed": {0: np.zeros(1, np.int32)}},
        {"biases": {0: (np.zeros(1, np.int32), np.zeros(1, np.float32))}},
        {"masks": lambda: (np.zeros(0, np.int32), np.zeros((0, 1), np.int32))},
        {"prompt_ids": np.zeros((2, 1), np.int32)},
        {"temperature": [0, 1], "top_p": [1, 0.9]},
        {"temperature": [0, 1], "top_k": MOST + 1},
    ],
    ids=lambda values: list(values)[-1],
)
def test_what_needs_whole_rows_gets_them(values):
    assert not len(pack_draws(sampling(2, **values)))


def test_few_rows_are_gathered(monkeypatch):
    monkeypatch.setattr("engine.sampling.sharded_draw.FEWEST", 3)
    assert [len(pack_draws(sampling(rows))) for rows in (0, 2, 3)] == [0, 0, 3]


def test_filters_of_greedy_rows_hold_nothing_up():
    assert len(pack_draws(sampling(2, temperature=[0, 1], top_p=[0.5, 1], top_k=[1000, 7]))) == 2


def test_on_a_gpu_rows_with_filters_are_gathered():
    assert len(pack_draws(sampling(3, temperature=[0, 0, 1], top_k=[5, 0, 0]), "cuda")) == 3
    for filtered in ({"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.9}):
        assert not len(pack_draws(sampling(3, temperature=[0, 0, 1], **filtered), "cuda"))
