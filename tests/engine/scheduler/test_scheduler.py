import gc
import random
from dataclasses import replace

import pytest

from engine.errors import IntegrityError
from engine.kv.block_manager import BlockManager
from engine.request import FinishReason, Request, Sequence
from engine.scheduler.prefill_adder import PrefillAdder
from engine.scheduler.waiting import FEW, WaitingQueue
from tests.engine.engine_driver import VOCAB, Driver, expected, request


def ids(report):
    return [sequence.request.request_id for sequence in report.sequences]


def test_a_step_mixes_decodes_and_prompt_chunks_within_its_budget():
    driver = Driver(max_num_batched_tokens=8, enable_prefix_caching=False)
    driver.core.add(request("a", 4, ignore_eos=True))
    driver.step()
    driver.core.add(request("b", 20, ignore_eos=True))
    reports = [driver.step() for _ in range(4)]
    assert [report.num_tokens for report in reports] == [8, 8, 7, 2]
    assert [ids(report) for report in reports] == [["a"], ["a"], ["a", "b"], ["a", "b"]]


def test_a_long_prompt_cannot_stall_decodes_or_short_prompts():
    driver = Driver(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    for name, length in (("first", 2), ("long", 30), ("short", 2)):
        driver.core.add(request(name, length, ignore_eos=True))
    report = driver.step()
    assert ids(report) == ["first", "short"]
    assert report.num_tokens == 2 + 3 + 2
    for _ in range(5):
        assert {"first", "short"} <= set(ids(driver.step()))


def test_more_decodes_than_budget_all_get_their_turn():
    driver = Driver(max_num_batched_tokens=3)
    wanted = request("many", 3, n=6, temperature=1.0, ignore_eos=True)
    driver.run(wanted)
    assert [driver.tokens["many", i] for i in range(6)] == [expected(wanted, i) for i in range(6)]


def test_first_come_first_served():
    driver = Driver(max_num_seqs=2)
    for name in "abcd":
        driver.core.add(request(name, 4, max_tokens=2, ignore_eos=True))
    assert [ids(driver.step()) for _ in range(4)] == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]


def test_priority_lets_the_urgent_pass():
    driver = Driver(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("late", 5), ("urgent", -1), ("middle", 0), ("middle too", 0)):
        one = request(name, 4, max_tokens=1)
        driver.core.add(Request(name, one.prompt_token_ids, one.params, priority=priority))
    assert [ids(driver.step()) for _ in range(4)] == [["urgent"], ["middle"], ["middle too"], ["late"]]


def test_priority_is_ignored_by_fcfs_and_an_older_arrival_goes_first():
    driver = Driver(max_num_seqs=1)
    one = request("x", 4, max_tokens=1)
    driver.core.add(Request("now", one.prompt_token_ids, one.params, priority=9))
    driver.core.add(Request("migrated", one.prompt_token_ids, one.params, priority=10, arrival_time=-5.0))
    assert [ids(driver.step()) for _ in range(2)] == [["migrated"], ["now"]]


def test_the_least_urgent_is_preempted():
    driver = Driver(num_blocks=8, max_num_seqs=4, scheduling_policy="priority")
    for name, priority in (("low", 1), ("high", 0)):
        one = request(name, 8, max_tokens=16, ignore_eos=True)
        driver.core.add(Request(name, one.prompt_token_ids, one.params, priority=priority))
    driver.drain()
    assert driver.finished["low", 0].sequence.preemptions > 0
    assert driver.finished["high", 0].sequence.preemptions == 0


def test_preemption_takes_the_youngest_and_changes_no_token():
    driver = Driver(num_blocks=12, max_num_seqs=4)
    requests = [request(f"r{i}", (i + 1, 2, 3, 4), max_tokens=24, ignore_eos=True) for i in range(4)]
    driver.run(*requests)
    assert driver.core.stats().preemptions > 0
    assert driver.finished["r0", 0].sequence.preemptions == 0
    for one in requests:
        assert driver.tokens[one.request_id, 0] == expected(one)


@pytest.mark.parametrize("caching", [True, False])
def test_a_cache_of_the_longest_sequence_serves_two_hundred_requests(caching):
    driver = Driver(num_blocks=11 + 1, max_num_seqs=8, enable_prefix_caching=caching)
    requests = [
        request(f"r{i}", tuple(1 + (i * 7 + j) % (VOCAB - 1) for j in range(1 + i % 23)), i, max_tokens=1 + i % 17)
        for i in range(200)
    ]
    driver.run(*requests)
    for one in requests:
        assert driver.tokens[one.request_id, 0] == expected(one), one.request_id
    assert driver.core.stats().preemptions > 0


def test_a_prefix_is_computed_once():
    driver = Driver()
    driver.run(request("first", 17, max_tokens=1))
    driver.core.add(request("second", (*request("", 17).prompt_token_ids[:16], 9, 9), max_tokens=1))
    report = driver.step()
    assert report.num_tokens == 2
    assert report.stats.prefix_hit_tokens == 16
    assert driver.finished["second", 0].sequence.num_cached_tokens == 16


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again():
    driver = Driver()
    wanted = request("again", 16)
    driver.run(request("first", 16))
    driver.core.add(wanted)
    assert driver.step().num_tokens == 4
    driver.drain()
    assert driver.tokens["again", 0] == expected(wanted)


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat():
    driver = Driver()
    first = request("turn 1", 10, max_tokens=11, ignore_eos=True)
    answer = driver.run(first)["turn 1", 0]
    driver.core.add(request("turn 2", (*first.prompt_token_ids, *answer, 5), max_tokens=1))
    assert driver.step().num_tokens == 22 - 20


def test_tenants_do_not_share_blocks():
    driver = Driver()
    one = request("a", 16, max_tokens=1)
    driver.run(one)
    driver.run(Request("b", one.prompt_token_ids, one.params, cache_salt=b"other"))
    assert driver.core.stats().prefix_hit_tokens == 0


def test_without_prefix_caching_nothing_is_kept_and_no_event_is_sent():
    driver = Driver(enable_prefix_caching=False)
    driver.run(request("a", 16))
    driver.core.add(request("b", 16))
    report = driver.step()
    assert report.num_tokens == 16
    assert (report.stats.prefix_query_tokens, report.stats.kv_blocks_cached) == (0, 0)
    assert report.events.stored == ()


def test_choices_share_the_prompt_and_part_when_they_write():
    driver = Driver(num_blocks=32)
    wanted = request("n", 10, seed=3, n=4, temperature=1.0, ignore_eos=True)
    driver.core.add(wanted)
    first = driver.step()
    assert first.num_tokens == 10
    assert [s.index for s in first.sequences] == [0, 1, 2, 3]
    held = first.stats.kv_blocks_total - first.stats.kv_blocks_free - first.stats.kv_blocks_cached
    assert held == 3
    second = driver.step()
    held = second.stats.kv_blocks_total - second.stats.kv_blocks_free - second.stats.kv_blocks_cached
    assert held == 2 + 4
    driver.drain()
    outputs = [driver.tokens["n", i] for i in range(4)]
    assert outputs == [expected(wanted, i) for i in range(4)]
    assert len({tuple(tokens) for tokens in outputs}) == 4


@pytest.mark.parametrize("length", [1, 7, 8, 9])
@pytest.mark.parametrize("num_blocks", [6, 9, 32])
def test_choices_survive_a_small_cache(length, num_blocks):
    driver = Driver(num_blocks=num_blocks, max_num_batched_tokens=5)
    wanted = request("n", length, seed=1, n=5, temperature=1.0, max_tokens=11, ignore_eos=True)
    driver.run(wanted)
    assert [driver.tokens["n", i] for i in range(5)] == [expected(wanted, i) for i in range(5)]


def test_slots_for_all_choices_are_kept_from_admission_on():
    driver = Driver(max_num_seqs=4, max_num_batched_tokens=4)
    driver.core.add(request("n", 8, n=3, ignore_eos=True))
    driver.core.add(request("pair", 8, n=2, ignore_eos=True))
    driver.core.add(request("one", 8, ignore_eos=True))
    driver.step()
    driver.step()
    report = driver.step()
    assert ids(report) == ["n", "n", "n"]
    assert report.stats.num_waiting == 2
    driver.drain()
    assert len(driver.finished) == 6


def test_a_resumed_choice_goes_on_at_its_next_token():
    wanted = request("whole", 10, seed=7, n=3, temperature=1.0, max_tokens=12, ignore_eos=True)
    logs = {0: tuple(expected(wanted, 0)[:5]), 2: tuple(expected(wanted, 2)[:11])}
    driver = Driver()
    driver.run(Request("moved", wanted.prompt_token_ids, wanted.params, seed=7, resume=logs))
    assert dict(driver.tokens) == {
        ("moved", 0): expected(wanted, 0)[5:],
        ("moved", 2): expected(wanted, 2)[11:],
    }
    assert driver.finished["moved", 0].sequence.num_output_tokens == 12


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("warm", "found"), [(0, 0), (9, 8), (17, 16)])
def test_what_all_choices_of_a_request_found_cached_is_counted_once(resumed, warm, found):
    driver = Driver(num_blocks=64, max_num_batched_tokens=9)
    wanted = request("n", 17, n=3, temperature=1.0, ignore_eos=True)
    if warm:
        driver.run(request("warm", warm, max_tokens=1))
    logs = {i: tuple(expected(wanted, i)[: i + 1]) for i in range(3)}
    driver.run(replace(wanted, resume=logs) if resumed else wanted)
    cached = [driver.finished["n", i].sequence.num_cached_tokens for i in range(3)]
    assert cached == [found, 0, 0], "its choices' prompt is no one else's"


def test_resumed_choices_share_their_prompt_through_the_cache():
    wanted = request("whole", 16, n=2, temperature=1.0, ignore_eos=True)
    driver = Driver(max_num_batched_tokens=17)
    logs = {i: tuple(expected(wanted, i)[:1]) for i in range(2)}
    driver.core.add(Request("moved", wanted.prompt_token_ids, wanted.params, resume=logs))
    assert driver.step().num_tokens == 17
    assert driver.step().num_tokens == 1 + 1


def test_an_abort_frees_everything_at_once_whatever_the_state():
    driver = Driver(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=6)
    driver.core.add(request("decoding", 4, n=2, ignore_eos=True))
    driver.step()
    driver.core.add(request("prefilling", 20, n=2, ignore_eos=True))
    driver.core.add(request("waiting", 8))
    driver.step()
    for name in ("prefilling", "waiting", "decoding"):
        assert driver.core.abort(name)
        driver.core.check_integrity()
    stats = driver.core.stats()
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
    assert (stats.num_running, stats.num_waiting, stats.outstanding_tokens) == (0, 0, 0)
    assert driver.core.has_unfinished
    driver.step()
    assert {key: finish.reason for key, finish in driver.finished.items()} == dict.fromkeys(
        [("decoding", 0), ("decoding", 1), ("prefilling", 0), ("prefilling", 1), ("waiting", 0)], FinishReason.ABORT
    )
    assert not driver.core.has_unfinished


def test_aborting_half_a_family_leaves_bystanders_exact():
    driver = Driver(num_blocks=16)
    bystander = request("by", 9, seed=2, temperature=1.0, ignore_eos=True)
    driver.core.add(request("gone", 9, n=3, ignore_eos=True))
    driver.core.add(bystander)
    driver.step()
    driver.step()
    assert driver.core.abort("gone")
    driver.drain()
    assert driver.tokens["by", 0] == expected(bystander)


def test_outstanding_tokens_count_what_is_still_to_compute():
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=1)
    driver.core.add(request("a", 12))
    driver.core.add(request("b", 5, n=1))
    assert driver.core.stats().outstanding_tokens == 17
    assert driver.step().stats.outstanding_tokens == 4 + 5
    assert driver.step().stats.outstanding_tokens == 5


def test_one_that_joins_leaves_room_for_those_who_run():
    driver = Driver(num_blocks=9, max_num_seqs=4)
    for name in ("a", "b"):
        driver.core.add(request(name, (len(name), 1, 2, 3), max_tokens=12, ignore_eos=True))
    driver.step()
    driver.core.add(request("big", 21, max_tokens=1))
    driver.drain()
    assert driver.core.stats().preemptions == 0


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("overlaps", [False, True])
def test_who_waits_for_blocks_starts_once_others_have_computed_its_prefix(late, overlaps):
    shape = {"max_model_len": 1536, "max_num_batched_tokens": 2048, "block_size": 16, "async_scheduling": overlaps}
    driver = Driver(num_blocks=101, **shape)
    prompt = tuple(1 + i % (VOCAB - 1) for i in range(960))
    driver.core.add(request("a", prompt, max_tokens=200, ignore_eos=True))
    for _ in range(late):
        driver.step()
    driver.core.add(request("b", prompt, max_tokens=16, ignore_eos=True))
    driver.core.add(request("c", 8))
    reports = [driver.step() for _ in range(4)]
    assert {"a", "b", "c"} <= {name for report in reports for name in ids(report)}


def test_a_long_prompt_that_waits_is_matched_once_while_another_computes_it(monkeypatch):
    """Steps look only at what is new: few times more digests in all than the prompt has blocks."""
    looked_up = []
    match = BlockManager.match
    monkeypatch.setattr(
        BlockManager, "match", lambda self, h, *rest: looked_up.append(len(h)) or match(self, h, *rest)
    )
    shape = {"max_model_len": 2048, "max_num_batched_tokens": 16, "long_prefill_token_threshold": 8}
    driver = Driver(num_blocks=301, **shape)
    prompt = tuple(1 + i % (VOCAB - 1) for i in range(960))
    driver.core.add(request("a", prompt, max_tokens=200, ignore_eos=True))
    driver.core.add(request("b", (*prompt, *prompt[:200]), max_tokens=1))
    steps = 0
    while not driver.tokens["b", 0]:
        driver.step()
        steps += 1
    assert steps > 100
    assert sum(looked_up) < 6 * (960 + 200) // 4


def refused_afresh(scheduler, sequence, *room):
    """Return whether a sequence that was refused is refused by one who remembers nothing, too."""
    kept, scheduler._blocked = scheduler._blocked, None
    prefix = PrefillAdder._fitting_prefix(scheduler, sequence, *room)
    scheduler._blocked = kept
    return prefix is None


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_nobody_is_kept_waiting_by_what_is_remembered_of_an_earlier_step(seed, policy, monkeypatch):
    """Prompts with common beginnings in a small cache: sealed, evicted, shared and given back while one waits."""
    remembered, decide = [], PrefillAdder._fitting_prefix

    def decided(scheduler, sequence, *room):
        known = scheduler._blocked is not None and scheduler._blocked.sequence is sequence
        prefix = decide(scheduler, sequence, *room)
        if prefix is None:
            remembered.append(known)
            with monkeypatch.context() as patch:
                patch.setattr(PrefillAdder, "_fitting_prefix", decide)
                assert refused_afresh(scheduler, sequence, *room)
        return prefix

    monkeypatch.setattr(PrefillAdder, "_fitting_prefix", decided)
    dice = random.Random(seed)
    driver = Driver(num_blocks=17, max_num_seqs=6, block_size=2, max_model_len=32, scheduling_policy=policy)
    roots = [tuple(dice.randrange(1, VOCAB) for _ in range(24)) for _ in range(2)]
    for number in range(120):
        prompt = (*dice.choice(roots)[: dice.randrange(1, 24)], *([dice.randrange(1, VOCAB)] * dice.randrange(3)))
        one = request(f"r{number}", prompt, number, n=dice.choice([1, 1, 2]), max_tokens=dice.randrange(1, 7))
        driver.core.add(replace(one, priority=dice.randrange(3)))
        for _ in range(dice.randrange(3)):
            driver.step()
        if not number % 7:
            driver.core.abort(f"r{dice.randrange(number + 1)}")
    driver.drain()
    assert remembered.count(True) > 30


@pytest.mark.parametrize("deadline", [None, 1e6])
def test_nothing_is_left_of_those_that_were_aborted_behind_one_that_waits(deadline):
    driver = Driver(num_blocks=9, max_num_seqs=4, max_model_len=32)
    driver.core.add(request("runs", 20, max_tokens=12, ignore_eos=True))
    driver.core.add(request("head", (9,) * 20))
    driver.step()
    for number in range(5000):
        driver.core.add(replace(request(f"gone {number}", 20), deadline=deadline))
        driver.core.abort(f"gone {number}")
        if not number % 1000:
            driver.core.step()
    driver.core.step()
    assert driver.core.stats().num_waiting == 1
    gc.collect()
    alive = {one.request_id for one in gc.get_objects() if type(one) is Request}
    assert {"runs", "head"} <= alive
    assert len([name for name in alive if name.startswith("gone")]) <= 1
    driver.drain()
    assert driver.tokens["head", 0] == expected(request("head", (9,) * 20))


def test_the_waiting_queue_forgets_those_who_left_and_keeps_the_order_of_the_others():
    dice, queue = random.Random(5), WaitingQueue()
    waiting, left = [], []
    for number in range(3000):
        one = Sequence(request(f"r{number}", 1), 0, 1, 1, order=(dice.randrange(5), float(number), number, 0))
        queue.push(one)
        waiting.append(one)
        while len(waiting) > 40 or (waiting and dice.random() < 0.4):
            left.append(waiting.pop(dice.randrange(len(waiting))))
            queue.remove(left[-1])
        if left and dice.random() < 0.3:  # as one that is preempted, again and again
            waiting.append(left.pop(dice.randrange(len(left))))
            queue.push(waiting[-1])
        queue.check_integrity()
        assert queue.peek() is min(waiting, key=lambda one: one.order, default=None)
        assert queue.num_entries <= 2 * len(queue) + FEW


def test_a_sequence_cannot_wait_twice():
    queue, sequence = WaitingQueue(), Sequence(request("a", 1), 0, 1, 1, order=(0, 0.0, 0, 0))
    queue.push(sequence)
    with pytest.raises(IntegrityError, match="waits twice"):
        queue.push(sequence)
