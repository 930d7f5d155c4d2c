"""A decode step that a run plans from the one before it is the one that would be planned anew, to the last array."""

import copy
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import StepMemoryError
from engine.inputs.prepare import InputBuilder
from engine.report import StepInputs
from engine.sampling.parameter_table import SamplingTable
from tests.engine.engine_driver import VOCAB, Driver, expected, request
from tests.engine.late_executor import LateExecutor

GIVEN = [name for name in StepInputs.__slots__ if name != "table_changes"]


class Recorder(LateExecutor):
    """Keeps what each step was given. refuses: the next one that is launched, for want of memory."""

    def __init__(self, *shape):
        super().__init__(*shape)
        self.launched = []
        self.refuses = False

    def launch(self, inputs, sampling):
        if self.refuses:
            self.refuses = False
            raise StepMemoryError("no memory")
        self.launched.append((copy.deepcopy(inputs), sampling.positions.copy(), dict(sampling.forbidden)))
        return super().launch(inputs, sampling)


class Recorded(Driver):
    """An engine whose steps are recorded. runs: whether decode steps may be planned from the one before."""

    def __init__(self, runs, num_blocks, block_size, **shape):
        executor = Recorder(num_blocks, block_size, VOCAB)
        super().__init__(num_blocks, executor, block_size=block_size, **shape)
        batch = self.core._scheduler._batch
        self.planned = Counter()
        for way in ("plan", "plan_on"):
            setattr(batch, way, self.counting(way, getattr(batch, way)))
        if not runs:
            batch.decode_run = lambda: None

    def counting(self, way, plan):
        def planned(*args):
            self.planned[way] += 1
            return plan(*args)

        return planned

    def told(self):
        """Run a step; return what it reported, without names of objects."""
        report = self.step()
        rows = [(one.request.request_id, one.index) for one in report.sequences]
        ends = [
            (end.sequence.request.request_id, end.sequence.index, end.reason, end.code) for end in report.finished
        ]
        return rows, report.token_ids, ends, report.events, report.stats, report.num_tokens, report.num_sequences


def assert_same_steps(one, other):
    assert len(one.executor.launched) == len(other.executor.launched)
    for (inputs, *drawn), (others, *drawn_there) in zip(one.executor.launched, other.executor.launched, strict=True):
        assert_same_inputs(inputs, others)
        assert drawn[0].tolist() == drawn_there[0].tolist() and drawn[1:] == drawn_there[1:]


def assert_same_inputs(one, other):
    for name in GIVEN:
        here, there = getattr(one, name), getattr(other, name)
        assert here.dtype == there.dtype and np.array_equal(here, there), name


additions = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 14),
        "seed": st.integers(0, 3),
        "max_tokens": st.integers(1, 24),
        "temperature": st.sampled_from([0.0, 1.0]),
        "n": st.sampled_from([1, 1, 1, 2]),
        "ignore_eos": st.booleans(),
    },
    optional={"min_tokens": st.just(1), "stop_token_ids": st.just(tuple(range(3, 60, 9)))},
)
events = st.one_of(
    st.tuples(st.just("add"), additions),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("refuse"), st.none()),
    st.tuples(st.just("forget"), st.none()),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("step"), st.integers(1, 9)),
)
shapes = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([14, 22, 64]),
        "max_num_seqs": st.sampled_from([2, 4, 8]),
        "max_num_batched_tokens": st.sampled_from([8, 16, 64]),
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.booleans(),
    },
    optional={"num_state_snapshots": st.sampled_from([0, 3]), "state_snapshot_blocks": st.just(1)},
)


def play(history, drivers):
    """Put both engines through a history; after each step they have told the same."""
    added = 0
    for what, how in history:
        for driver in drivers:
            if what == "add":
                asked = dict(how)
                one = request(f"r{added}", asked.pop("prompt"), asked.pop("seed"), **asked)
                driver.core.add(one)
            elif what == "abort":
                driver.core.abort(f"r{how}")
            elif what == "refuse":
                driver.executor.refuses = True
            elif what == "forget":
                driver.core.reset_prefix_cache()
        added += what == "add"
        for _ in range(how if what == "step" else 0):
            one, other = [driver.told() for driver in drivers]
            assert one == other


@given(shapes, st.sampled_from([1, 2, 4]), st.lists(events, min_size=4, max_size=24))
@settings(max_examples=60, deadline=None)
def test_all_histories_take_the_same_steps_with_runs_and_without(shape, block_size, history):
    settings = {**shape, "block_size": block_size, "max_model_len": 13 * block_size}
    if block_size == 1:
        settings |= {"max_model_len": 40, "num_blocks": 64}
    history = [(what, fitted(how, settings["max_model_len"]) if what == "add" else how) for what, how in history]
    drivers = [Recorded(runs, **settings) for runs in (True, False)]
    play(history, drivers)
    for driver in drivers:
        driver.executor.refuses = False
    while drivers[0].core.has_unfinished:
        play([("step", 1)], drivers)
    assert not drivers[1].core.has_unfinished
    assert_same_steps(*drivers)
    assert drivers[1].planned["plan_on"] == 0
    costs = [driver.costs() for driver in drivers]
    assert costs[0] == costs[1]


def fitted(asked, room):
    """Cut a request to what a context holds."""
    prompt = min(asked["prompt"], room - 2)
    return asked | {"prompt": prompt, "max_tokens": min(asked["max_tokens"], room - prompt)}


def test_steps_of_an_unchanging_batch_are_planned_from_the_one_before():
    driver = Recorded(True, 64, 4, max_model_len=64)
    for number in range(3):
        driver.core.add(request(f"r{number}", 3 + number, max_tokens=40, ignore_eos=True))
    driver.drain()
    # Planned anew: the prompts, the first decode step, and those at the end, in which sequences come to their limit.
    assert driver.planned == {"plan": 3, "plan_on": 37}


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_builder_that_did_not_prepare_the_step_before_last_gives_the_same_inputs(interrupted):
    driver = Recorded(True, 64, 4, max_model_len=64)
    core, continued = driver.core, []
    kept, prepare = builder(core), core._launcher._inputs.prepare

    def prepared(schedule):
        other = kept if interrupted else builder(core)
        if interrupted:
            other.prepare(schedule.alone(0))
        inputs, sampling = prepare(schedule)
        assert_same_inputs(other.prepare(schedule)[0], inputs)
        continued.append(schedule.continued is not None)
        return inputs, sampling

    core._launcher._inputs.prepare = prepared
    for number in range(3):
        core.add(request(f"r{number}", 3 + number, max_tokens=40, ignore_eos=True))
    driver.drain()
    assert sum(continued) == 37


def builder(core):
    return InputBuilder(core._tables, SamplingTable(8), core._masks, 4, 64)


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_step_that_was_planned_and_not_launched_is_planned_anew(overlaps):
    driver = Recorded(True, 64, 2, max_model_len=64, async_scheduling=overlaps)
    asked = [request(f"r{number}", 3 + number, max_tokens=30, ignore_eos=True) for number in range(2)]
    for one in asked:
        driver.core.add(one)
    driver.step()
    driver.step()
    for step in range(16):
        driver.executor.refuses = driver.core._in_flight.is_wanted if overlaps else step == 7
        driver.step()
    driver.executor.refuses = False
    driver.drain()
    alive = asked if overlaps else asked[:1]  # without a step in flight, the newest has to go
    for one in alive:
        assert driver.tokens[one.request_id, 0] == expected(one)
    assert driver.planned["plan_on"] > 10


def test_a_queue_behind_a_full_batch_ends_no_run():
    driver = Recorded(True, 64, 4, max_model_len=64, max_num_seqs=1)
    for number in range(2):
        driver.core.add(request(f"r{number}", 3, max_tokens=40, ignore_eos=True))
    driver.drain()
    assert driver.planned == {"plan": 6, "plan_on": 74}


def test_a_run_starts_again_where_a_sequence_comes_or_goes():
    driver = Recorded(True, 64, 4, max_model_len=64)
    driver.core.add(request("a", 3, max_tokens=30, ignore_eos=True))
    for _ in range(10):
        driver.step()
    driver.core.add(request("b", 3, max_tokens=30, ignore_eos=True))
    for _ in range(10):
        driver.step()
    driver.core.abort("a")
    driver.drain()
    assert driver.planned["plan"] == 6
    twin = Recorded(False, 64, 4, max_model_len=64)
    twin.core.add(request("b", 3, max_tokens=30, ignore_eos=True))
    twin.drain()
    assert driver.tokens["b", 0] == twin.tokens["b", 0]
