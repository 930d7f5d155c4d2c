"""The sampling kernels against the sampler of the CPU, through the interpreter, and what they compile to."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl

from engine.kernels.triton_draw import RUN_INDEX, _gumbel
from engine.kernels.triton_sampler import RUN, TritonDraws
from engine.sampling import gumbel as race
from engine.sampling.gumbel import gumbel
from engine.sampling.sampler import FAILED, STUCK
from tests.engine.sampling.batches import batches, draws_of, ruled, shares_of
from tests.engine.sampling.test_logit_rules import bits_of
from tests.engine.sampling.test_sampler import allowed, chi_square_fits, random_logits
from tests.engine.thread_group import on_ranks
from tests.long import examples, long
from tests.parity.stepping import sample, sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OURS = TritonDraws()


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what is allocated with NaN and the largest integers, so that what nobody wrote is not read unseen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tokens(logits, inputs, draws=OURS):
    """Return the codes of tokens, drawn on the device by the kernels or on the CPU."""
    device = DEVICE if draws else torch.device("cpu")
    return sample(logits.clone().to(device), inputs, draws).token_ids.cpu().numpy()


def agree(logits, inputs):
    ours, theirs = tokens(logits, inputs), tokens(logits, inputs, None)
    np.testing.assert_array_equal(ours, theirs)
    return ours


@settings(max_examples=examples(15))
@given(batches())
def test_the_tokens_are_those_of_the_cpu(batch):
    agree(*batch)


@pytest.mark.parametrize("values", [{}, {"top_k": 2}, {"min_p": 0.01}])
def test_a_top_p_that_is_nothing_in_fp32_leaves_the_best(values):
    logits = torch.tensor([[-16.0, 0.5, 1.0, -2.0]])
    assert agree(logits, sampling(1, temperature=1.0, top_p=5e-324, **values)) == [2]


@settings(max_examples=examples(15))
@given(batches(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_what_is_drawn_from_16_bits_is_what_would_be_from_a_copy_in_32(batch, dtype):
    logits, inputs = batch
    given = logits.clamp(-6e4, 6e4).to(dtype)
    np.testing.assert_array_equal(tokens(given, inputs), tokens(given.float(), inputs))


@pytest.mark.parametrize(
    ("values", "drawn_from"),
    [
        ({}, torch.bfloat16),
        ({"top_k": 3, "top_p": 0.5}, torch.bfloat16),
        ({"temperature": 0.0}, torch.bfloat16),
        ({"num_logprobs": 2}, torch.float32),
        ({"presence_penalty": 1.0}, torch.float32),
    ],
)
def test_only_rules_and_log_probabilities_take_a_copy_of_the_logits(values, drawn_from):
    class Watched(TritonDraws):
        def draw(self, given, inputs):
            seen.append(given)
            return super().draw(given, inputs)

    seen, logits = [], torch.stack([random_logits(500, row) for row in range(3)]).to(DEVICE, torch.bfloat16)
    was = logits.clone()
    changes = {"prompt_ids": np.zeros((3, 1), np.int32)} if "presence_penalty" in values else {}
    sample(logits, sampling(3, **{"temperature": 1.0, **values, **changes}), Watched())
    assert seen[0].dtype is drawn_from
    assert (seen[0] is logits) == (drawn_from is torch.bfloat16)
    assert torch.equal(logits, was)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 10},
        {"min_p": 0.4},
        {"top_p": 0.5},
        {"top_k": 10, "top_p": 0.5},
        long({"min_p": 0.4, "top_p": 0.5}),
        {"top_k": 60, "min_p": 0.4},
    ],
    ids=str,
)
def test_each_filter_leaves_what_it_leaves_on_the_cpu(filters):
    logits = random_logits(130, spread=0.5).expand(8, -1)
    found = agree(logits, sampling(8, temperature=0.9, positions=np.arange(8), **filters))
    kept = set(np.flatnonzero(allowed(logits[0], temperature=0.9, **filters)))
    assert 1 < len(set(found.tolist()) & kept) == len(set(found.tolist()))


@pytest.mark.parametrize(("filters", "kept"), [({"top_p": 0.9}, 9), ({"top_k": 2}, 2), ({"top_k": 4}, 4)], ids=str)
def test_filters_are_exact_where_one_id_of_each_run_has_its_mass(filters, kept):
    logits = torch.full((640,), -20.0)
    logits[7::64] = torch.linspace(1.5, 1.0, 10)
    found = agree(logits.expand(12, -1), sampling(12, temperature=1.0, positions=np.arange(12), **filters))
    runs = {token // 64 for token in found.tolist()}
    assert runs <= set(range(kept))
    assert len(runs) > kept // 2


def test_the_lowest_of_equals_is_taken():
    logits = torch.zeros(2, 200)
    logits[1, [70, 71, 190]] = 1.0
    assert agree(logits, sampling(2)).tolist() == [0, 70]


@triton.jit
def _noise(key, out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, _gumbel(tl.load(key).to(tl.uint64, bitcast=True), index.to(tl.uint64) + RUN_INDEX))


@pytest.mark.parametrize("key", [0, 5, -1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # it wraps, as it should
def test_the_noise_is_that_of_the_cpu(key):
    """To its last bits, which tokens tell nothing of."""
    keys, found = torch.tensor([key]), torch.empty(64, dtype=torch.float64, device=DEVICE)
    _noise[(1,)](keys.to(DEVICE), found, COUNT=64)
    expected = gumbel(keys, torch.arange(64)[None] + race.RUN_INDEX)[0]
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-13, atol=1e-13)


def test_runs_are_those_of_the_sampler():
    assert RUN == race.RUN


@pytest.mark.parametrize("poison", [[math.nan], [math.inf], [-math.inf] * 130])
@pytest.mark.parametrize(
    "values", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 3, "min_p": 0.1}], ids=str
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN where the row is lost anyway
def test_a_poisoned_row_is_named_and_disturbs_nobody(poison, values):
    logits = torch.stack([random_logits(130, seed) for seed in range(3)])
    logits[1, : len(poison)] = torch.tensor(poison)
    found = agree(logits, sampling(3, **values))
    assert (found == FAILED).tolist() == [False, True, False]


def test_rules_and_masks_hold_and_a_row_without_a_token_is_stuck():
    logits, inputs = ruled()
    found = agree(logits, inputs)
    assert found[0] == 17
    assert found[1] in (5, 64, 99)
    assert found[2] in (0, 31, 32, 98)
    assert found[3:5].tolist() == [STUCK, STUCK]
    ours = sample(logits.clone().to(DEVICE), inputs, OURS).logprobs
    theirs = sample(logits.clone(), inputs).logprobs
    torch.testing.assert_close(ours.chosen.cpu(), theirs.chosen)


@pytest.mark.parametrize("vocab", [31, 32, 33, 5000])
def test_masks_forbid_just_what_has_no_bit(vocab):
    kept = np.flatnonzero(np.random.default_rng(0).random(vocab) < 0.5)
    logits = torch.zeros(3, vocab, device=DEVICE)
    bits = torch.from_numpy(np.stack([bits_of(kept, vocab)])).to(DEVICE)
    OURS.forbid(logits, torch.tensor([1], dtype=torch.int32, device=DEVICE), bits)
    assert np.flatnonzero(logits[1].cpu().numpy() == 0).tolist() == kept.tolist()
    assert not logits[[0, 2]].any()


def test_a_row_gets_the_same_token_alone_and_in_any_company():
    random = np.random.default_rng(0)
    count, vocab = 8, 300
    logits = torch.stack([random_logits(vocab, seed) for seed in range(count)])
    values = {
        "temperature": random.choice([0, 0.7, 1.3], count),
        "top_k": random.choice([0, 1, 40], count),
        "top_p": random.choice([1, 0.5, 0.99], count),
        "seeds": random.integers(-(2**63), 2**63 - 1, count),
        "positions": random.integers(1, 99, count),
    }
    together = tokens(logits, sampling(count, **values))
    for row in range(count):
        alone = sampling(1, **{name: value[row] for name, value in values.items()})
        assert tokens(logits[row : row + 1], alone)[0] == together[row]


def test_tokens_follow_the_distribution():
    count, logits = 300, random_logits(70)
    rows = logits.expand(count, -1)  # strided: every row is the same memory
    found = sample(rows.to(DEVICE), sampling(count, temperature=1.0, positions=np.arange(count)), OURS)
    counts = np.bincount(found.token_ids.cpu().numpy(), minlength=70)
    assert chi_square_fits(counts, allowed(logits))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_without_filters_are_left_alone_by_those_of_others():
    logits = torch.stack([random_logits(130, seed) for seed in range(4)])
    logits[1, 1:] = -math.inf
    logits[2, 0] = math.nan
    found = agree(logits, sampling(4, temperature=[1, 1, 1, 0], top_k=[3, 0, 5, 2]))
    assert found[1:3].tolist() == [0, FAILED]


def test_flat_rows_with_top_p_alone_keep_all_their_runs():
    logits = torch.stack([random_logits(64 * 70, seed, spread=0.01) for seed in range(2)])  # two tiles of runs
    agree(logits, sampling(2, temperature=1.0, top_p=[0.5, 0.999], seeds=[1, 2]))


def test_logits_whose_rows_lie_apart_are_read_where_they_are():
    wide = torch.stack([random_logits(200, seed) for seed in range(3)])
    inputs = sampling(3, temperature=1.0, top_k=9)
    assert tokens(wide, inputs).tolist() != (found := OURS.draw(wide.to(DEVICE)[:, :150], inputs).tolist())
    assert found == tokens(wide[:, :150], inputs, None).tolist()


def test_no_rows_give_no_tokens():
    assert OURS.draw(torch.empty(0, 70, device=DEVICE), sampling(0)).shape == (0,)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("vocab", [long(50), 65, 1000])
def test_shares_of_a_vocabulary_draw_the_very_tokens_of_the_whole(size, vocab):
    rng = np.random.default_rng(vocab + size)
    logits = torch.stack([random_logits(vocab, seed) for seed in range(12)])
    logits[2] = logits[2].round()  # ties
    logits[5] = 0.0
    logits[7, vocab // 2], logits[8, 0], logits[9] = math.nan, math.inf, -math.inf
    logits[10, : vocab // 2] = -math.inf
    temperature = rng.choice([0, 0.3, 1.0, 1.7], 12).astype(np.float32)
    inputs = sampling(12, temperature=temperature, seeds=rng.integers(0, 2**62, 12), positions=np.arange(12))
    draws = draws_of(inputs)
    shares = [share.to(DEVICE) for share in shares_of(logits, size)]

    def act(group):
        return OURS.draw_share(shares[group.rank], draws, vocab, group).cpu().numpy()

    expected = tokens(logits, inputs)
    for found in on_ranks(size, act, in_turn=True):
        np.testing.assert_array_equal(found, expected)
    assert expected[7] == FAILED


def test_filters_are_not_looked_for_in_shares():
    inputs = sampling(1, temperature=1.0, top_k=3)
    with pytest.raises(ValueError, match="top_k"):
        OURS.draw_share(torch.zeros(1, RUN, device=DEVICE), draws_of(inputs), RUN, None)
