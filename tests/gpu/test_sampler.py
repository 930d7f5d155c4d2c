"""Sampling on a GPU: the tokens of the CPU at real vocabularies, and no word with the host on the way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.worker.step_outputs import HostSide, outputs_of
from tests.parity.stepping import sample, sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

VOCAB = 151_936  # Qwen3
FILTERS = [
    {},
    {"top_k": 50},
    {"top_p": 0.95},
    {"top_k": 20, "top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 5000, "top_p": 0.999, "min_p": 0.001},
    {"top_k": VOCAB - 1},
    {"top_p": 1e-5},
]


@pytest.fixture(scope="module")
def draws():
    from engine.kernels.triton_sampler import TritonDraws

    return TritonDraws()


def some(rows, vocab=VOCAB, spread=3.0, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def both(logits, inputs, draws):
    ours = sample(logits.cuda(), inputs, draws).token_ids.cpu().numpy()
    return ours, sample(logits.clone(), inputs).token_ids.numpy()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.02, 3.0])
@pytest.mark.parametrize("vocab", [VOCAB, 50_257])
def test_the_tokens_are_those_of_the_cpu(draws, filters, spread, vocab):
    rows = 16
    inputs = sampling(rows, temperature=0.6, seeds=np.arange(rows), positions=np.arange(rows), **filters)
    ours, theirs = both(some(rows, vocab, spread), inputs, draws)
    # Sums in another order may decide a race that is level to about 1e-6.
    assert (ours != theirs).sum() <= 1


def test_greedy_rows_ties_and_poison(draws):
    logits = some(5).round()
    logits[1, 77] = torch.nan
    logits[2, 77] = torch.inf
    logits[3] = -torch.inf
    for temperature in (0, 1):
        ours, theirs = both(logits, sampling(5, temperature=temperature, top_k=9), draws)
        assert ours.tolist() == theirs.tolist()
        assert ours[1:4].tolist() == [-1, -1, -1]


def test_a_row_gets_the_same_token_in_any_company(draws):
    rows = 64
    logits = some(rows).cuda()
    mixed = np.random.default_rng(0)
    values = {
        "temperature": mixed.choice([0, 0.6, 1], rows), "top_k": mixed.choice([0, 20], rows),
        "top_p": mixed.choice([1, 0.9], rows), "seeds": np.arange(rows),
    }  # fmt: skip
    together = sample(logits, sampling(rows, **values), draws).token_ids.tolist()
    for row in range(0, rows, 7):
        alone = sampling(1, **{name: value[row] for name, value in values.items()})
        assert sample(logits[row : row + 1], alone, draws).token_ids.tolist() == [together[row]]


def everything(rows):
    """Sampling parameters with every rule there is."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (rows, 50)).astype(np.int32)
    inputs = sampling(
        rows, temperature=0.7, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.2, prompt_ids=ids, output_ids=ids[:, :9], num_logprobs=5,
    )  # fmt: skip
    inputs.biases = {0: (np.array([5, 9], np.int32), np.array([3, -100], np.float32))}
    inputs.allowed = {1: np.arange(1000, dtype=np.int32)}
    inputs.forbidden = {2: (1, 2, 3), 3: (7,)}
    masks = np.random.default_rng(1).integers(-(2**31), 2**31, (2, VOCAB // 32)).astype(np.int32)
    inputs.masks = lambda: (np.array([2, 4], np.int32), masks)
    return inputs


def test_rules_give_the_tokens_of_the_cpu(draws):
    ours, theirs = both(some(6), everything(6), draws)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("inputs", [sampling(6), sampling(6, temperature=1, top_p=0.9), everything(6)])
def test_nothing_waits_for_the_device(draws, inputs):
    logits = some(6).cuda()
    sample(logits.clone(), inputs, draws)  # what is compiled or looked up once is done here
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sample(logits, inputs, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.token_ids.is_cuda


def test_a_step_that_draws_nothing_brings_nothing(draws):
    outputs = outputs_of(iter(()), sampling(0), draws)
    assert HostSide(torch.device("cuda")).fetch(outputs).result().token_ids.size == 0
