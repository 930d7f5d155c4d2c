"""The compiled sampler of the CPU against torch's operations."""

import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import compiler
from engine.kernels.native_sampler import NativeDraws, draw_library
from engine.kernels.select import select_draws
from engine.sampling.gumbel import RUN
from engine.sampling.sampler import FAILED, STUCK, score
from parallel import c_library
from tests.engine.sampling.batches import VOCABULARIES, batches, draws_of, ruled, shares_of
from tests.engine.sampling.test_logit_rules import bits_of
from tests.engine.sampling.test_sampler import allowed, chi_square_fits, random_logits
from tests.engine.thread_group import on_ranks
from tests.long import examples, long
from tests.parity.stepping import sample, sampling

CPU = torch.device("cpu")
LARGE = 20_001  # ids: more runs than top-p looks at first

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, c_library.COMPILERS)), reason="no C compiler on this machine"
)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what is allocated with NaN, so that what nobody wrote is not read unseen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def ours(threads=2):
    library = draw_library()
    assert library is not None
    return NativeDraws(library, threads)


def agree(logits, inputs, draws=None):
    found = sample(logits.clone(), inputs, draws or ours()).token_ids.numpy()
    np.testing.assert_array_equal(found, sample(logits.clone(), inputs).token_ids.numpy())
    return found


@settings(max_examples=examples(200))
@given(batches((*VOCABULARIES, 1000, LARGE)), st.sampled_from([1, 2]))
def test_the_tokens_are_those_of_torch(batch, threads):
    agree(*batch, ours(threads))


@settings(max_examples=examples(60))
@given(batches(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_what_is_drawn_from_16_bits_is_what_would_be_from_a_copy_in_32(batch, dtype):
    logits, inputs = batch
    short = logits.clamp(-6e4, 6e4).to(dtype)
    expected = sample(short.float(), inputs).token_ids
    assert ours().draw(short, inputs).tolist() == expected.tolist()


def shapes():
    """Rows that top-p ends in at all sorts of places, [.., LARGE], by name."""
    noise = torch.randn(4, LARGE, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(LARGE)
    certain, close = noise.clone(), noise.clone()
    certain[:, 777] += 20  # one id has all
    close[:, 640:660] += 14  # ids of one run have all
    every = (ids // RUN) % (-(-LARGE // RUN) // 64) == 0  # about the runs that are looked at for a guess
    return {
        "steep": noise * 5, "flat": noise * 0.01, "one id": certain, "one run": close, "equal": torch.zeros(4, LARGE),
        "two values": noise.sign(), "light guess": noise - 3.0 * every, "heavy guess": noise + 3.0 * every,
        "negative": noise - 1e4, "half out": noise.where(noise > 0, -math.inf),
        "one left": noise.where(ids == 12_345, -math.inf),
    }  # fmt: skip


@pytest.mark.parametrize("shape", shapes())
def test_top_p_ends_where_it_does_in_torch(shape):
    logits = shapes()[shape].float().repeat(2, 1)
    random = np.random.default_rng(len(shape))
    for temperature, more in ((0.3, {}), (1.0, {"min_p": 1e-5}), (4.0, {"top_k": 15_000})):
        top_p = random.choice([1e-6, 0.05, 0.5, 0.9, 0.95, 0.9999, 1 - 2**-24], len(logits))
        inputs = sampling(len(logits), temperature=temperature, top_p=top_p, seeds=np.arange(len(logits)), **more)
        agree(logits, inputs)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 10},
        {"min_p": 0.4},
        {"top_p": 0.5},
        {"top_k": 10, "top_p": 0.5},
        {"min_p": 0.4, "top_p": 0.5},
        {"top_k": 60, "min_p": 0.4},
    ],
    ids=str,
)
def test_each_filter_leaves_just_its_set(filters):
    logits = random_logits(130, spread=0.5)
    rows = logits.expand(3000, -1)
    found = agree(rows, sampling(3000, temperature=0.9, positions=np.arange(3000), **filters))
    kept = allowed(logits, temperature=0.9, **filters)
    assert set(found.tolist()) == set(np.flatnonzero(kept).tolist())
    assert chi_square_fits(np.bincount(found, minlength=130), kept)


@pytest.mark.parametrize("top_k", [1, 2, 63, 64, 65, 313, 5000, LARGE - 1, LARGE, LARGE + 1])
def test_top_k_counts_across_runs(top_k):
    noise = torch.randn(6, LARGE, generator=torch.Generator().manual_seed(1))
    agree(noise, sampling(6, temperature=9.0, top_k=top_k, seeds=np.arange(6)))
    agree(noise.round(), sampling(6, temperature=9.0, top_k=top_k, seeds=np.arange(6)))


@pytest.mark.parametrize(("filters", "kept"), [({"top_p": 0.9}, 9), ({"top_k": 2}, 2), ({"top_k": 4}, 4)], ids=str)
def test_filters_are_exact_where_one_id_of_each_run_has_its_mass(filters, kept):
    logits = torch.full((640,), -20.0)
    logits[7::64] = torch.linspace(1.5, 1.0, 10)
    found = agree(logits.expand(64, -1), sampling(64, temperature=1.0, positions=np.arange(64), **filters))
    assert {token // 64 for token in found.tolist()} == set(range(kept))


def test_ties_with_the_last_are_kept_after_division():
    """Logits that differ in the last bit and no more once they are divided by temperature."""
    values = 1.9 + torch.arange(20) * 2.0**-23
    first = int(torch.nonzero((values / 1.8).diff() == 0)[0, 0])
    logits = torch.zeros(64, 130)
    logits[:, 5], logits[:, 70] = values[first], values[first + 1]
    found = agree(logits, sampling(64, temperature=1.8, top_k=1, positions=np.arange(64)))
    assert values[first] < values[first + 1]
    assert set(found.tolist()) == {5, 70}


def test_the_lowest_of_equals_is_taken():
    logits = torch.zeros(3, 200)
    logits[1, [70, 71, 190]] = 1.0
    logits[2, :100] = -0.0
    assert agree(logits, sampling(3)).tolist() == [0, 70, 0]


@pytest.mark.parametrize("vocab", [130, LARGE])
@pytest.mark.parametrize("poison", [[math.nan], [math.inf], [-math.inf]])
@pytest.mark.parametrize(
    "values", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 3, "min_p": 0.1}], ids=str
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN where the row is lost anyway
def test_a_poisoned_row_is_named_and_disturbs_nobody(vocab, poison, values):
    for at in (0, 17, vocab - 1):
        logits = torch.stack([random_logits(vocab, seed) for seed in range(3)])
        if poison == [-math.inf]:
            logits[1] = -math.inf
        else:
            logits[1, at] = poison[0]
        assert (agree(logits, sampling(3, **values)) == FAILED).tolist() == [False, True, False]


def test_rules_and_masks_hold_and_a_row_without_a_token_is_stuck():
    logits, inputs = ruled()
    found = agree(logits, inputs)
    assert found[0] == 17
    assert found[3:5].tolist() == [STUCK, STUCK]


def mixed(count, vocab, seed=0):
    """Return rows of all kinds and their parameters, an array each."""
    random = np.random.default_rng(seed)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))
    logits *= torch.from_numpy(random.choice([0.1, 1, 4], (count, 1))).float()
    return logits, {
        "temperature": random.choice([0, 0.7, 1.3], count),
        "top_k": random.choice([0, 1, 40, 3000], count),
        "top_p": random.choice([1, 0.5, 0.9, 0.99], count),
        "min_p": random.choice([0, 0.01], count),
        "seeds": random.integers(-(2**63), 2**63 - 1, count),
        "choices": np.arange(count) % 3,
        "positions": random.integers(1, 99, count),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_token_alone_in_any_company_and_on_any_number_of_threads(dtype):
    logits, values = mixed(48, LARGE)
    logits = logits.to(dtype)
    together = ours(2).draw(logits, sampling(48, **values)).tolist()
    backwards = {name: value[::-1] for name, value in values.items()}
    assert ours(1).draw(logits.flip(0), sampling(48, **backwards)).tolist() == together[::-1]
    assert ours(3).draw(logits, sampling(48, **values)).tolist() == together
    draws = ours(1)
    for row in range(48):
        alone = sampling(1, **{name: value[row] for name, value in values.items()})
        assert draws.draw(logits[row : row + 1], alone)[0] == together[row]


def test_what_is_kept_of_one_step_is_not_seen_in_the_next():
    draws = ours()
    for count, vocab in ((3, LARGE), (9, 65), (2, 4 * LARGE), (30, 1000), (1, 1)):
        logits, values = mixed(count, vocab, seed=vocab)
        agree(logits, sampling(count, **values), draws)


@pytest.mark.parametrize("isa", compiler.isas())
def test_other_cpus_draw_the_same_tokens(isa, monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.ISA_VARIABLE, isa)
    monkeypatch.setattr(c_library, "cache_folder", lambda name: tmp_path)
    draws = ours()
    for seed in range(6):
        logits, values = mixed(16, LARGE, seed)
        agree(logits, sampling(16, **values), draws)
    assert len(list(tmp_path.iterdir())) == 1


def test_logits_are_read_where_they_are_and_left_as_they_were():
    wide = torch.stack([random_logits(200, seed) for seed in range(3)])
    was, inputs = wide.clone(), sampling(3, temperature=1.0, top_k=9, top_p=0.9)
    found = ours().draw(wide[:, :150], inputs).tolist()
    assert torch.equal(wide, was)
    assert found == sample(wide[:, :150].clone(), inputs).token_ids.tolist()
    across = ours().draw(wide.T.contiguous().T, inputs)  # ids of a row lie apart
    assert across.tolist() == sample(wide, inputs).token_ids.tolist()


def test_no_rows_give_no_tokens():
    assert ours().draw(torch.empty(0, 70), sampling(0)).shape == (0,)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("vocab", [long(50), 65, 1000, long(LARGE)])
@pytest.mark.parametrize("filtered", [False, True])
def test_shares_of_a_vocabulary_draw_the_very_tokens_of_the_whole(size, vocab, filtered):
    random = np.random.default_rng(vocab + size)
    logits = torch.stack([random_logits(vocab, seed) for seed in range(30)])
    logits[2] = logits[2].round()  # ties
    logits[5] = 0.0
    logits[7, vocab // 2], logits[8, 0], logits[9] = math.nan, math.inf, -math.inf
    logits[10, : vocab // 2] = -math.inf
    inputs = sampling(
        30, temperature=random.choice([0, 0.3, 1.0, 1.7], 30), seeds=random.integers(0, 2**62, 30),
        top_k=random.choice([0, 1, 40], 30) * filtered, min_p=random.choice([0, 0.1], 30) * filtered,
    )  # fmt: skip
    shares = shares_of(logits, size)

    def act(group):
        own = shares[group.rank].clone()
        return ours(1).draw_share(own, draws_of(inputs), vocab, group).numpy()

    expected = agree(logits, inputs)
    for found in on_ranks(size, act):
        np.testing.assert_array_equal(found, expected)
    assert expected[[7, 8, 9]].tolist() == [FAILED] * 3


def test_what_draws_is_chosen_and_said(caplog, monkeypatch):
    caplog.set_level("INFO")
    assert type(select_draws(CPU)) is NativeDraws
    assert "sampling: compiled for this CPU" in caplog.text
    monkeypatch.setattr(c_library.shutil, "which", lambda name: None)
    assert select_draws(CPU) is None
    assert "sampling: torch's operations" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 130, LARGE])
def test_log_probabilities_are_those_of_torch(dtype, vocab):
    logits = torch.stack([random_logits(vocab, seed, spread) for seed, spread in enumerate((0.01, 1, 2, 30))])
    logits[3, vocab // 2 :] = -math.inf
    logits = logits.to(dtype)
    tokens = torch.tensor([0, vocab - 1, int(logits[2].argmax()), vocab - 1])
    for count in (0, 1, 20):
        found = score(logits, tokens, count, ranked=True, draws=ours())
        expected = score(logits, tokens, count, ranked=True)
        torch.testing.assert_close(found.chosen, expected.chosen)
        torch.testing.assert_close(found.top, expected.top)
        assert torch.equal(found.ranks, expected.ranks)
        told = logits.gather(1, found.top_ids.long())
        assert torch.equal(told, logits.gather(1, expected.top_ids.long()))
        assert all(len(set(ids)) == len(ids) for ids in found.top_ids.tolist())


def test_of_equal_logits_the_lowest_ids_are_told():
    logits = torch.zeros(2, 1000)
    logits[1, [900, 70, 3]] = torch.tensor([2.0, 1.0, 1.0])
    found = score(logits, torch.tensor([5, 5]), 5, draws=ours())
    assert found.top_ids.tolist() == [[0, 1, 2, 3, 4], [900, 3, 70, 0, 1]]


def test_scores_of_a_row_are_the_same_in_any_company_and_nan_where_it_is_poisoned():
    logits, _ = mixed(20, LARGE)
    logits[7, 9], logits[8] = math.nan, -math.inf
    tokens = torch.arange(20)
    together = score(logits, tokens, 4, ranked=True, draws=ours(2))
    alone = [score(logits[row : row + 1], tokens[row : row + 1], 4, ranked=True, draws=ours(1)) for row in range(20)]
    for name in ("chosen", "top", "top_ids", "ranks"):
        joined = torch.cat([getattr(each, name) for each in alone])
        np.testing.assert_array_equal(joined.numpy(), getattr(together, name).numpy())
    assert together.chosen.isnan().nonzero()[:, 0].tolist() == [7, 8]
    assert together.top.isnan().all(dim=1).nonzero()[:, 0].tolist() == [7, 8]


RULES = ("biases", "allowed", "forbidden", "penalties", "pairs", "endings", "masks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_one_row_copies_that_row_alone(rule, dtype):
    logits, values = mixed(12, 500)
    logits = logits.to(dtype)
    logits[2, 3], logits[5, 1] = math.nan, math.inf
    penalties = {"presence_penalty": [0] * 5 + [1] + [0] * 3 + [2] + [0] * 2} if rule == "penalties" else {}
    ids = np.random.default_rng(0).integers(0, 500, (12, 30)).astype(np.int32)
    asks = rule in ("penalties", "pairs", "endings")
    history = {"prompt_ids": ids, "output_ids": ids[:, :9]} if asks else {}
    inputs = sampling(12, num_logprobs=3, **values, **penalties, **history)
    if rule == "biases":
        inputs.biases = {
            5: (np.array([17], np.int32), np.array([9], np.float32)),
            9: (ids[0], np.ones(30, np.float32)),
        }
    if rule == "allowed":
        inputs.allowed = {5: np.array([5, 64], np.int32), 9: np.array([7], np.int32)}
    if rule == "forbidden":
        inputs.forbidden = {5: (1,), 9: tuple(range(500))}
    last = ids[:, 8]
    if rule == "pairs":
        inputs.pairs = {5: (last[[4, 5]], ids[5, :2]), 9: (last[[9]], ids[9, :1])}
    if rule == "endings":
        inputs.endings = np.array([(5, last[5], 1), (9, last[9], 7), (9, last[8], 8)], np.int32)
    if rule == "masks":
        inputs.masks = lambda: (np.array([5, 9], np.int32), np.stack([bits_of([0, 31], 500), bits_of([], 500)]))

    class Watched(NativeDraws):
        def draw(self, given, asked):
            seen.append(given)
            return super().draw(given, asked)

    seen, was = [], logits.clone()
    found = sample(logits, inputs, Watched(draw_library(), 2))
    expected = sample(was.clone(), inputs)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.token_ids[[2, 5]].tolist() == [FAILED, FAILED]
    torch.testing.assert_close(found.logprobs.top, expected.logprobs.top, equal_nan=True)
    if rule != "masks":
        np.testing.assert_array_equal(logits.float().numpy(), was.float().numpy())
        assert seen[0] is logits
        assert sorted(len(given) for given in seen) == [2, 12]
