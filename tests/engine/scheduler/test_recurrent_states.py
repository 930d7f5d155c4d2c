"""Recurrent states on a late device: whatever happens around a request, its tokens are those of a run alone."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from engine.kv.snapshots import StateSnapshots
from engine.request import FinishReason
from tests.engine.engine_driver import VOCAB, Driver, expected, request
from tests.engine.recurrent_executor import RecurrentExecutor
from tests.engine.scheduler.test_engine_state_machine import CONTEXT, EngineMachine, PromptDriver, shapes, undisturbed


def driver(kind=Driver, num_blocks=64, **given):
    wanted = {"max_num_seqs": 8, "block_size": 4, "num_state_snapshots": 6, "state_snapshot_blocks": 2, **given}
    states = wanted["max_num_seqs"] + wanted["num_state_snapshots"]
    late = RecurrentExecutor(num_blocks, wanted["block_size"], VOCAB, states)
    return kind(num_blocks=num_blocks, executor=late, **wanted)


def hits(one):
    return one.core.stats().prefix_hit_tokens


def test_a_prefix_is_found_up_to_its_deepest_snapshot():
    one = driver()
    first, second = request("a", 30), request("b", (*request("a", 30).prompt_token_ids[:22], 50, 51))
    one.run(first)
    assert hits(one) == 0
    one.run(second)
    assert hits(one) == 16  # five blocks of four are the same, and snapshots are eight tokens apart
    assert one.tokens["a", 0] == expected(first)
    assert one.tokens["b", 0] == expected(second)


def test_no_chunk_crosses_a_boundary_and_the_prompt_is_computed_once():
    one = driver(max_num_batched_tokens=64)
    one.core.add(request("a", 30, max_tokens=1))
    chunks = []
    while one.core.has_unfinished:
        chunks.append(one.step().num_tokens)
    assert chunks == [8, 8, 8, 6]


def test_without_snapshots_prompts_are_computed_whole_and_nothing_is_found():
    one = driver(max_num_batched_tokens=64, num_state_snapshots=0)
    for name in "ab":
        one.core.add(request(name, 30, max_tokens=1))
        assert one.step().num_tokens == 30
        one.drain()
    assert hits(one) == 0
    assert one.tokens["b", 0] == expected(request("b", 30, max_tokens=1))


def test_decoding_leaves_snapshots_too():
    one = driver()
    one.run(request("a", 6, max_tokens=20, ignore_eos=True))
    prompt = (*request("a", 6).prompt_token_ids, *one.tokens["a", 0])
    one.run(request("b", prompt))
    assert hits(one) == 24
    assert one.tokens["b", 0] == expected(request("b", prompt))


def test_the_choices_of_a_request_each_get_its_state():
    one = driver()
    wanted = request("a", 13, n=3, temperature=1.0, ignore_eos=True)
    one.run(wanted)
    for choice in range(3):
        assert one.tokens["a", choice] == expected(wanted, choice)


def test_the_least_recently_used_snapshot_makes_way():
    one = driver(num_state_snapshots=2)
    prompts = [tuple(range(start, start + 9)) for start in (1, 20, 40)]
    for number, prompt in enumerate([prompts[0], prompts[1], prompts[0], prompts[2]]):
        one.run(request(str(number), prompt, max_tokens=1))
    before = hits(one)
    assert before == 8  # of the third run
    one.run(request("again", prompts[1], max_tokens=1))
    assert hits(one) == before
    one.run(request("kept", prompts[2], max_tokens=1))
    assert hits(one) == before + 8


def test_a_step_that_broke_off_is_not_computed_upon():
    one = driver()
    kept, shed = request("kept", 10, max_tokens=12, ignore_eos=True), request("shed", 10, max_tokens=12)
    one.core.add(kept)
    for _ in range(4):
        one.step()
    one.core.add(shed)
    one.step()
    one.executor.breaks = True
    one.drain()
    assert one.reason("shed") is FinishReason.ERROR
    assert one.tokens["kept", 0] == expected(kept)


def test_a_held_snapshot_outlives_the_cache():
    found = StateSnapshots(4, 1, 8)
    found.seal(found.take(), b"a")
    slot = found.hold(b"a")
    assert found.take() is None
    found.clear()
    assert found.take() is None
    found.check_integrity([], [slot])
    found.let_go(slot)
    assert found.take() == slot == 4


class RecurrentMachine(EngineMachine):
    """All that the engine is put through, steps that break off besides, with states that must be right."""

    @initialize(
        shape=shapes,
        tokens=st.integers(10, 44),
        snapshots=st.integers(0, 5),
        apart=st.sampled_from([1, 2, 4]),
        overlaps=st.booleans(),
    )
    def start(self, shape, tokens, snapshots, apart, overlaps):
        size = shape["block_size"]
        given = {"state_snapshot_blocks": apart, "num_state_snapshots": snapshots, "async_scheduling": overlaps}
        self.driver = driver(PromptDriver, 1 + tokens // size, max_model_len=CONTEXT, **{**shape, **given})
        self.accepted, self.aborted, self.cut_short = {}, set(), set()
        self.broke = False

    @rule()
    def break_off(self):
        self.driver.executor.breaks = self.broke = True

    def check(self, one, request_id, index):
        if self.broke and self.driver.reason(request_id, index) is FinishReason.ERROR:  # it was shed
            got = [*self.log(one, index), *self.driver.tokens[request_id, index]]
            assert got == undisturbed(one)[index][0][: len(got)]
        else:
            super().check(one, request_id, index)

    def check_prompt(self, one, request_id):
        if not self.broke:
            super().check_prompt(one, request_id)


TestRecurrent = RecurrentMachine.TestCase
TestRecurrent.settings = settings(max_examples=80, stateful_step_count=25)
