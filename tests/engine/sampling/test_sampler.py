import math

import numpy as np
import pytest
import torch

from engine.sampling.gumbel import by_halves
from engine.sampling.sampler import CANDIDATES, score
from tests.parity.stepping import drawn, sampling


def draws(logits, count, **values):
    """Draw `count` tokens from one row of logits, as one request would at its successive positions."""
    rows = logits.expand(count, -1).clone()
    return drawn(rows, sampling(count, positions=np.arange(count), **values)).token_ids


def allowed(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the probabilities after all filters, one token at a time, in fp64."""
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p * weights.max()] = 0
    order = np.argsort(-weights, kind="stable")
    if top_k:
        weights[order[top_k:]] = 0
    left = weights.sum() * top_p
    for token in order:
        if left <= 0:
            weights[token] = 0
        left -= weights[token]
    return weights / weights.sum()


def chi_square_fits(counts, probabilities):
    expected = probabilities * counts.sum()
    assert counts[probabilities == 0].sum() == 0
    common = expected >= 5
    statistic = ((counts[common] - expected[common]) ** 2 / expected[common]).sum()
    freedom = common.sum() - 1
    return statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1))


def random_logits(vocab, seed=0, spread=2.0):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("vocab", [50, 128, 1000])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_follow_the_filtered_distribution(vocab, filters):
    logits = random_logits(vocab)
    values = {"temperature": 1.0, **filters}
    tokens = draws(logits, 8000, seeds=3, **values)
    assert chi_square_fits(np.bincount(tokens, minlength=vocab), allowed(logits, **values))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_beyond_the_candidates_is_exact(top_p):
    vocab = 4 * CANDIDATES
    logits = random_logits(vocab, spread=0.01)  # nearly flat: the set is larger than what is looked at first
    tokens = draws(logits, 6_000, temperature=1.0, top_p=top_p)
    expected = allowed(logits, top_p=top_p)
    assert set(tokens) <= set(np.flatnonzero(expected))
    # A set that were too small would miss some of its tokens for good.
    assert len(set(tokens)) > 0.99 * np.count_nonzero(expected) * (1 - math.exp(-6_000 / vocab / top_p))


def test_greedy_takes_the_best_and_low_temperature_nearly_so():
    logits = random_logits(300)
    best = int(logits.argmax())
    assert set(draws(logits, 5)) == {best}
    assert set(draws(logits, 50, temperature=0.01)) == {best}


def test_top_k_one_is_greedy_at_any_temperature():
    logits = random_logits(300)
    assert set(draws(logits, 50, temperature=100.0, top_k=1)) == {int(logits.argmax())}


def test_ties_at_the_limit_are_all_kept():
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert set(draws(logits, 500, temperature=1.0, top_k=2)) == {0, 1, 2, 3}


def test_a_row_gets_the_same_token_alone_and_in_any_company():
    rng = np.random.default_rng(0)
    count, vocab = 24, 700
    logits = torch.stack([random_logits(vocab, seed) for seed in range(count)])
    ids = rng.integers(0, vocab, (count, 9)).astype(np.int32)
    values = {
        "temperature": rng.choice([0, 0.7, 1.3], count),
        "top_k": rng.choice([0, 1, 40, 600], count),
        "top_p": rng.choice([1, 0.5, 0.99], count),
        "min_p": rng.choice([0, 0.1], count),
        "seeds": rng.integers(-(2**63), 2**63 - 1, count),
        "choices": np.arange(count) % 3,
        "positions": rng.integers(1, 99, count),
        "repetition_penalty": rng.choice([1, 1.2], count),
        "presence_penalty": rng.choice([0, 0.5], count),
    }
    together = drawn(logits.clone(), sampling(count, prompt_ids=ids, output_ids=ids[:, :3], **values)).token_ids
    for row in range(count):
        mine = {name: value[row] for name, value in values.items()}
        inputs = sampling(1, prompt_ids=ids[row : row + 1], output_ids=ids[row : row + 1, :3], **mine)
        assert drawn(logits[row : row + 1].clone(), inputs).token_ids[0] == together[row]


def test_seed_choice_and_position_each_give_other_tokens():
    logits = torch.zeros(4000)
    first = draws(logits, 20, temperature=1.0, seeds=1)
    assert len(set(first)) > 15
    assert (draws(logits, 20, temperature=1.0, seeds=2) != first).sum() > 15
    assert (draws(logits, 20, temperature=1.0, seeds=1, choices=1) != first).sum() > 15


def penalised(logits, prompt, output, **values):
    """Return the penalised logits of one row, read back from the log-probabilities of near-certain bans."""
    expected = logits.clone()
    repetition = values.get("repetition_penalty", 1.0)
    for token in set(prompt) | set(output):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(output):
        expected[token] -= output.count(token) * values.get("frequency_penalty", 0.0)
        expected[token] -= values.get("presence_penalty", 0.0)
    return expected


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3, "presence_penalty": -1.0, "frequency_penalty": 0.4},
    ],
    ids=str,
)
def test_penalties_match_a_loop_over_tokens(values):
    vocab, prompt, output = 64, [1, 2, 3, 3, 63], [3, 4, 4, 4, 0]
    pad = [-1] * 3
    for seed in range(30):
        logits = random_logits(vocab, seed)
        rows = torch.stack([logits, logits])
        inputs = sampling(
            2,
            prompt_ids=np.array([[-1] * 8, prompt + pad], np.int32),
            output_ids=np.array([[-1] * 8, output + pad], np.int32),
            **{name: [1.0 if name.startswith("rep") else 0.0, value] for name, value in values.items()},
        )
        expected = penalised(logits, prompt, output, **values)
        assert drawn(rows, inputs).token_ids.tolist() == [int(logits.argmax()), int(expected.argmax())]
        torch.testing.assert_close(rows[1], expected)
        torch.testing.assert_close(rows[0], logits)


def test_first_token_has_no_output_to_penalise():
    logits = torch.tensor([[1.0, 0.9]])
    ids = np.array([[0]], np.int32)
    inputs = sampling(1, prompt_ids=ids, output_ids=np.empty((1, 0), np.int32), repetition_penalty=2.0)
    assert drawn(logits, inputs).token_ids.tolist() == [1]


def test_forbidden_ids_are_never_drawn():
    logits = torch.tensor([[5.0, 4.0, 3.0], [5.0, 4.0, 3.0]])
    assert drawn(logits, sampling(2, forbidden={1: (0, 1)})).token_ids.tolist() == [0, 2]
    tokens = drawn(
        torch.zeros(500, 3),
        sampling(500, temperature=1.0, positions=np.arange(500), forbidden=dict.fromkeys(range(500), (1,))),
    ).token_ids
    assert set(tokens) == {0, 2}


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.stack([random_logits(60, seed) for seed in range(4)])
    expected = logits.log_softmax(-1)
    ids = np.zeros((4, 1), np.int32)
    inputs = sampling(
        4, temperature=[0, 0.3, 2, 0], seeds=9, top_k=5, repetition_penalty=1.7, prompt_ids=ids, output_ids=ids,
        num_logprobs=3, forbidden={3: (int(logits[3].argmax()),)},
    )  # fmt: skip
    outputs = drawn(logits.clone(), inputs)
    top = expected.topk(3)
    np.testing.assert_array_equal(outputs.logprobs.top_ids, top.indices.numpy())
    np.testing.assert_allclose(outputs.logprobs.top, top.values.numpy(), rtol=1e-5)
    chosen = expected[torch.arange(4), torch.from_numpy(outputs.token_ids).long()]
    np.testing.assert_allclose(outputs.logprobs.chosen, chosen.numpy(), rtol=1e-5)


def test_whole_rows_are_the_log_probabilities_of_all_tokens_before_any_rule():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    rows = np.array([0, 2])
    inputs = sampling(3, temperature=[0, 1, 1], num_logprobs=0, whole_rows=rows, forbidden={2: (1, 2)})
    outputs = drawn(logits.clone(), inputs)
    expected = logits.log_softmax(dim=-1).numpy()
    assert sorted(outputs.logprobs.whole) == [0, 2]
    for row, values in outputs.logprobs.whole.items():
        np.testing.assert_allclose(values, expected[row], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(values[outputs.token_ids[row]], outputs.logprobs.chosen[row], rtol=1e-5)
    assert outputs.logprobs.top.shape == (3, 0)


def test_zero_logprobs_give_the_chosen_tokens_only():
    outputs = drawn(torch.zeros(2, 8), sampling(2, num_logprobs=0))
    assert outputs.logprobs.top_ids.shape == (2, 0)
    np.testing.assert_allclose(outputs.logprobs.chosen, math.log(1 / 8), rtol=1e-6)


@pytest.mark.parametrize("poison", [[math.nan], [math.inf], [-math.inf] * 130])
@pytest.mark.parametrize(
    "values", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 3}], ids=str
)
def test_a_poisoned_row_is_named_and_disturbs_nobody(poison, values):
    logits = torch.stack([random_logits(130, seed) for seed in range(3)])
    alone = drawn(logits[[0, 2]].clone(), sampling(2, num_logprobs=1, **values))
    logits[1, : len(poison)] = torch.tensor(poison)
    outputs = drawn(logits, sampling(3, num_logprobs=1, **values))
    assert outputs.failed == (1,)
    assert outputs.token_ids[[0, 2]].tolist() == alone.token_ids.tolist()
    assert outputs.token_ids[1] == 0
    np.testing.assert_allclose(outputs.logprobs.top[[0, 2]], alone.logprobs.top, rtol=1e-6)


def test_sound_rows_name_no_failure():
    assert drawn(torch.zeros(2, 8), sampling(2)).failed == ()


@pytest.mark.parametrize("vocab", [1, 2, 63, 1000])
def test_sums_by_halves_are_exact_enough_and_each_row_by_itself(vocab):
    logits = torch.stack([random_logits(vocab, seed, spread=5.0) for seed in range(9)])
    logits[3, 0] = -math.inf
    logits[3, -1] = 2.0
    found = by_halves(logits)
    torch.testing.assert_close(found, logits.double().logsumexp(-1, keepdim=True).float(), rtol=1e-6, atol=1e-6)
    for row in range(len(logits)):
        assert torch.equal(by_halves(logits[row : row + 1])[0], found[row])


def test_the_rank_of_a_token_counts_all_that_are_as_likely():
    logits = torch.tensor([[0.0, 3.0, 1.0, -math.inf], [2.0, 2.0, 2.0, 5.0], [1.0, 0.0, 0.0, 0.0]])
    for tokens, ranks in (([1, 3, 0], [1, 1, 1]), ([2, 1, 2], [2, 4, 4]), ([3, 0, 1], [4, 4, 4])):
        assert score(logits, torch.tensor(tokens), 0, ranked=True).ranks.tolist() == ranks
    assert score(logits, torch.tensor([0, 0, 0]), 2).ranks is None


def test_which_of_equal_logits_are_told_does_not_depend_on_how_many_others_want():
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(1)).bfloat16().float()  # many are equal
    tokens = torch.zeros(50, dtype=torch.int64)
    most = score(logits, tokens, 20)
    for count in range(20):
        found = score(logits, tokens, count)
        assert torch.equal(found.top_ids, most.top_ids[:, :count])
        assert torch.equal(found.top, most.top[:, :count])
