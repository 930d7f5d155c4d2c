"""Bias, allowed ids, bad words and masks: on real logits, and through the engine."""

import threading

import numpy as np
import pytest
import torch

from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar
from engine.inputs.grammar_masks import ROWS_EACH, MaskMaker
from engine.request import FinishReason, GrammarState, Sequence
from engine.sampling import device_rules, logit_rules
from engine.sampling.device_rules import DeviceRules
from engine.sampling.logit_rules import apply_rules, forbid
from engine.sampling.sampler import score
from engine.sampling_params import SamplingParams, StructuredOutput
from tests.engine.engine_driver import EOS, VOCAB, Driver, expected, request
from tests.fake_executor import FakeExecutor
from tests.parity.stepping import as_ints, drawn, sampling


def logits_of(rows, vocab=100, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def bits_of(ids, vocab=100):
    flags = np.zeros(-(-vocab // 32) * 32, np.uint8)
    flags[ids] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def test_a_bias_moves_its_own_row_only():
    logits = logits_of(3)
    inputs = sampling(3, temperature=0)
    inputs.biases = {1: (np.array([7, 8], np.int32), np.array([100, -100], np.float32))}
    outputs = drawn(logits.clone(), inputs)
    assert outputs.token_ids[1] == 7
    assert outputs.token_ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_is_allowed_is_drawn(temperature):
    logits = logits_of(200)
    inputs = sampling(200, temperature=temperature, positions=np.arange(200))
    inputs.allowed = {row: np.array([5, 64, 99], np.int32) for row in range(0, 200, 2)}
    inputs.masks = lambda: (np.arange(1, 200, 2, dtype=np.int32), np.stack([bits_of([0, 31, 32, 98])] * 100))
    tokens = drawn(logits.clone(), inputs).token_ids
    assert set(tokens[::2].tolist()) <= {5, 64, 99}
    assert set(tokens[1::2].tolist()) <= {0, 31, 32, 98}
    assert len(set(tokens.tolist())) == 7
    if not temperature:
        assert tokens[0] == [5, 64, 99][logits[0, [5, 64, 99]].argmax()]


def test_a_row_without_a_token_is_stuck_and_not_poisoned():
    logits = logits_of(4)
    logits[3, 5] = float("nan")
    inputs = sampling(4, temperature=0)
    inputs.allowed = {1: np.array([5], np.int32)}
    inputs.forbidden = {1: (5,)}
    inputs.masks = lambda: (np.array([2], np.int32), bits_of([])[None])
    outputs = drawn(logits.clone(), inputs)
    assert (outputs.stuck, outputs.failed) == ((1, 2), (3,))
    assert outputs.token_ids[0] == logits[0].argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_model_gave_is_judged_before_the_rules_and_they_make_nothing_infinite(temperature):
    huge = float(torch.finfo(torch.float32).max)
    logits = logits_of(5)
    logits[0, 5] = float("nan")
    logits[1, 7] = float("inf")
    logits[2, :] = float("-inf")
    logits[3, 4] = huge
    logits[4, :] = -huge
    ids = np.tile(np.arange(100, dtype=np.int32), (5, 1))
    rules = {"repetition_penalty": [1.0, 1.0, 1.0, 0.01, 100.0], "frequency_penalty": -2.0}
    inputs = sampling(5, temperature=temperature, prompt_ids=ids, output_ids=ids, **rules)
    inputs.allowed = {0: np.array([4], np.int32)}  # nobody would draw the bad ones
    inputs.forbidden = {1: (7,)}
    inputs.biases = {row: (np.array([4], np.int32), np.array([100.0], np.float32)) for row in (2, 3)}
    outputs = drawn(logits.clone(), inputs)
    assert (outputs.failed, outputs.stuck) == ((0, 1, 2), (4,))
    assert outputs.token_ids[3] == 4


def test_a_prompt_token_that_the_model_rules_out_poisons_nothing():
    logits = logits_of(4)
    logits[0, 5] = float("-inf")
    logits[1, 7] = float("inf")
    logits[2, 7] = float("nan")
    logits[3, :] = float("-inf")
    found = score(logits, torch.full((4,), 5), 1)
    assert found.chosen[0] == float("-inf") and found.top.isfinite().tolist() == [[True], [False], [False], [False]]
    assert found.chosen.isnan().tolist() == [False, True, True, True]


def test_penalties_are_to_the_bit_those_of_a_loop_over_the_tokens_of_each_row(monkeypatch):
    """One after another, as many times as a token is there: x - f - f is not x - 2f. In parts, and in any order."""
    random = np.random.default_rng(5)
    count, vocab = 24, 70
    rules = {
        "repetition_penalty": random.choice([1, 1.3, 0.7, 2], count),
        "presence_penalty": random.choice([0, 0.5, -0.3], count),
        "frequency_penalty": random.choice([0, 0.17, -0.9], count),
    }
    prompts, outputs = (random.integers(-1, vocab, (count, 60)).astype(np.int32) for _ in range(2))
    prompts[:, 0] = 1  # there is always a prompt
    outputs[::5] = -1
    logits = logits_of(count, vocab)
    expected = logits.clone().numpy()
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        repetition, presence, frequency = (np.float32(values[row]) for values in rules.values())
        for token in {*prompt.tolist(), *output.tolist()} - {-1}:
            value = expected[row, token]
            expected[row, token] = value / repetition if value > 0 else value * repetition
        for token in output[output >= 0]:
            expected[row, token] -= frequency
        expected[row, list({*output.tolist()} - {-1})] -= presence
    for most in (logit_rules.TOKENS_AT_A_TIME, 100):
        monkeypatch.setattr(logit_rules, "TOKENS_AT_A_TIME", most)
        for found in (logits.clone(), torch.nn.functional.pad(logits, (0, 3))[:, :vocab]):
            inputs = sampling(count, prompt_ids=prompts, output_ids=outputs, **rules)
            apply_rules(found, inputs, forbid, DeviceRules(inputs.logs))
            np.testing.assert_array_equal(found.numpy(), expected)


def test_what_completes_a_bad_word_hangs_on_the_last_token_of_the_output_alone():
    inputs = sampling(4, prompt_ids=as_ints([[50]] * 4), output_ids=as_ints([[-1, -1], [7, 50], [7, 51], [50, 7]]))
    assert inputs.changes_logits
    inputs.pairs = dict.fromkeys(range(4), (as_ints([50, 51, 50]), as_ints([9, 9, 8])))
    inputs.endings = as_ints([(1, 50, 6), (2, 50, 6)])
    logits = logits_of(4)
    apply_rules(logits, inputs, forbid, DeviceRules(inputs.logs))
    assert torch.isinf(logits).nonzero().tolist() == [[1, 6], [1, 8], [1, 9], [2, 9]]


def test_static_rules_are_sent_once_and_joined_anew_when_the_rows_change(monkeypatch):
    sent = []
    monkeypatch.setattr(device_rules, "_send", lambda ids, device: sent.append(1) or [torch.from_numpy(ids).long()])
    first, second, third = (np.arange(start, start + 3) for start in (0, 5, 9))
    rules, device = device_rules.DeviceRules(), torch.device("cpu")
    asked = {0: first, 2: second}
    for _ in range(3):
        rows, ids = rules.joined("allowed", asked, device)
        assert (rows.tolist(), ids.tolist()) == ([0, 0, 0, 2, 2, 2], [0, 1, 2, 5, 6, 7])
    rows, ids = rules.joined("allowed", {0: second, 1: third}, device)
    assert (rows.tolist(), ids.tolist(), len(sent)) == ([0, 0, 0, 1, 1, 1], [5, 6, 7, 9, 10, 11], 3)
    moved = rules.moved("allowed", asked, np.array([0, 1, 2]))
    assert rules.moved("allowed", asked, np.array([0, 1, 2])) is moved
    assert list(rules.moved("allowed", asked, np.array([0, 2]))) == [0, 1]


def test_masks_are_filled_by_several_threads_and_a_late_token_is_taken_once():
    class Paired(GrammarState):
        """Fills its mask only while another thread fills another."""

        met = threading.Barrier(2)
        finished = False

        def __init__(self):
            self.taken = []

        def accept(self, token_id):
            self.taken.append(token_id)
            return True

        def fill(self, bits):
            self.met.wait(10)
            bits[:] = len(self.taken)

    def choice():
        return Sequence(request("r", 3), 0, 3, 3 + 2, grammar=Paired(), num_matched=1)

    choices = [choice() for _ in range(2 * ROWS_EACH)]
    asked = []
    maker = MaskMaker(16, VOCAB, lambda: asked.append(1) or np.array([5, 6], np.int32), threads=2)
    rows, bits = maker.start(range(2 * ROWS_EACH), choices, [-1] * len(choices))()
    assert (rows.tolist(), bits.any(), asked) == ([*range(2 * ROWS_EACH)], False, [])
    late = maker.start(range(2 * ROWS_EACH), choices, [1] * len(choices))
    assert not asked
    for _ in range(2):  # a step that found no memory is launched again
        assert late()[1].tolist() == [[1, 1]] * len(choices)
    choices[0].match(6, 2)  # as when the step is taken in
    assert [one.grammar.taken for one in choices] == [[6]] * len(choices)
    maker.close()


def test_log_probabilities_are_those_before_the_rules():
    logits = logits_of(1)
    inputs = sampling(1, temperature=0, num_logprobs=3)
    inputs.allowed = {0: np.array([4], np.int32)}
    found = drawn(logits.clone(), inputs).logprobs
    assert found.chosen[0] == pytest.approx(float(logits.log_softmax(-1)[0, 4]), abs=1e-5)
    assert found.top_ids[0].tolist() == logits[0].topk(3).indices.tolist()


def test_allowed_ids_hold_for_every_token_and_bystanders_are_untouched():
    driver = Driver()
    allowed, by = request("r", 5, allowed_token_ids=(3, 9), n=2, seed=4), request("by", 6)
    tokens = driver.run(allowed, by)
    assert {*tokens["r", 0], *tokens["r", 1]} <= {3, 9}
    assert tokens["by", 0] == expected(by)


def test_a_bad_word_is_never_completed_and_its_beginning_is_free():
    plain = request("plain", 5, ignore_eos=True)
    says = expected(plain)
    word = tuple(says[2:5])
    driver = Driver()
    tokens = driver.run(request("r", 5, ignore_eos=True, bad_words="x", bad_words_ids=(word, (says[0],))))["r", 0]
    assert says[0] not in tokens
    assert all(tuple(tokens[i : i + 3]) != word for i in range(len(tokens)))
    driver = Driver()
    tokens = driver.run(request("r", 5, ignore_eos=True, bad_words="x", bad_words_ids=(word,)))["r", 0]
    assert tokens[:4] == says[:4]
    assert tokens[4] != says[4]


def test_a_word_that_begins_in_the_prompt_is_no_bad_word():
    plain = request("plain", 5, ignore_eos=True)
    says = expected(plain)
    word = (plain.prompt_token_ids[-1], says[0])
    found = Driver().run(request("r", 5, ignore_eos=True, bad_words="x", bad_words_ids=(word,)))["r", 0]
    assert found[0] == says[0]


def test_rules_without_any_token_left_end_that_request_alone():
    driver, by = Driver(), request("by", 6)
    driver.run(request("r", 5, allowed_token_ids=(3,), bad_words="x", bad_words_ids=((3,),)), by)
    assert driver.reason("r") is FinishReason.ERROR
    assert driver.tokens["by", 0] == expected(by)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"bad_words": "x", "bad_words_ids": ((VOCAB,),)}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"structured": StructuredOutput("json_object")}, "structured"),
    ],
)
def test_what_the_model_does_not_know_is_refused_by_name(params, field):
    with pytest.raises(InvalidRequestError) as caught:
        Driver().core.add(request("r", 5, **params))
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias"),
        ({"allowed_token_ids": (True,)}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"structured": StructuredOutput("json_object"), "min_tokens": 2}, "min_tokens"),
        ({"structured": StructuredOutput("json_object"), "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_params_out_of_range_are_refused_by_name(params, field):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**params)
    assert caught.value.param == field


class Ascending(CompiledGrammar):
    """Tokens must rise; after `length` of them comes the end of sequence."""

    def __init__(self, length):
        self.length = length

    def state(self, budget=None):
        return AscendingState(self.length)


class AscendingState(GrammarState):
    def __init__(self, length):
        self.length, self.taken = length, []

    def allowed(self):
        last = self.taken[-1] if self.taken else 0
        return [EOS] if len(self.taken) == self.length else list(range(last + 1, VOCAB - self.length))

    def accept(self, token_id):
        if token_id not in self.allowed():
            return False
        self.taken.append(token_id)
        return True

    def fill(self, bits):
        bits[:] = bits_of(self.allowed(), VOCAB)

    @property
    def finished(self):
        return EOS in self.taken


def structured(name, **params):
    return request(name, 5, structured=StructuredOutput("json_object"), **params)


def test_a_grammar_rules_every_choice_and_ends_it():
    driver, by = Driver(num_blocks=12, max_num_batched_tokens=6), request("by", 6)
    driver.core.add(structured("r", n=3, temperature=1.0, max_tokens=20), Ascending(5))
    tokens = driver.run(by, *[request(f"more{i}", 9, ignore_eos=True) for i in range(5)])
    for choice in range(3):
        *rising, end = tokens["r", choice]
        assert rising == sorted(set(rising))
        assert (len(rising), end) == (5, EOS)
        assert driver.reason("r", choice) is FinishReason.STOP
    assert tokens["by", 0] == expected(by)


def test_a_grammar_goes_on_after_any_token_of_its_log():
    whole = Driver()
    whole.core.add(structured("r", temperature=1.0, max_tokens=20), Ascending(5))
    whole.drain()
    says = whole.tokens["r", 0]
    for taken in range(1, len(says)):
        driver = Driver()
        resumed = structured("r", temperature=1.0, max_tokens=20)
        object.__setattr__(resumed, "resume", {0: tuple(says[:taken])})
        driver.core.add(resumed, Ascending(5))
        driver.drain()
        assert driver.tokens["r", 0] == says[taken:]


def test_a_grammar_that_fails_ends_its_own_request():
    class Broken(Ascending):
        def state(self, budget=None):
            state = AscendingState(self.length)
            state.fill = lambda bits: 1 / 0
            return state

    driver, by = Driver(), request("by", 6)
    driver.core.add(structured("r"), Broken(5))
    driver.run(by)
    assert driver.reason("r") is FinishReason.ERROR
    assert driver.tokens["by", 0] == expected(by)


def test_an_end_that_the_grammar_does_not_allow_is_an_error():
    class Deaf(FakeExecutor):
        """Draws the end at once, whatever the masks say."""

        def execute(self, inputs, sampling):
            outputs = super().execute(inputs, sampling)
            if sampling.masks is not None:
                outputs.token_ids[sampling.masks()[0]] = EOS
            return outputs

    driver, by = Driver(executor=Deaf(64, 4, VOCAB)), request("by", 6)
    driver.core.add(structured("r"), Ascending(5))
    driver.run(by)
    assert driver.reason("r") is FinishReason.ERROR
    assert driver.tokens["by", 0] == expected(by)
