"""How the GPU bench takes time: what lies between its events, and at which length what is timed lies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.worker.graph_pool import GraphPool
from engine.worker.graph_sizes import GraphSizes
from tests.bench.gpu import profiled as profiling
from tests.bench.gpu import session
from tests.bench.gpu.part_decode import prompt_length, recorded_steps
from tests.bench.gpu.profiled import profiled, short
from tests.bench.gpu.scale import FULL, TINY
from tests.bench.gpu.session import Session
from tests.bench.gpu.timing import L2_BYTES, WARM_UPS, rotations, seconds_per_call

CUDA = torch.device("cuda:0")


@pytest.fixture
def told(monkeypatch):
    """What a GPU that is played is told, in order; each call takes it 4 ms."""
    found = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            found.append("event")

        def synchronize(self):
            found.append("wait")

        def elapsed_time(self, end):
            return 4.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: found.append("lead"))
    return found


def test_a_gpu_has_other_work_until_it_has_been_told_what_is_timed(told):
    assert seconds_per_call([lambda: told.append("call")] * 2, CUDA, 3, warm_seconds=0) == [0.002] * 3
    once = ["lead", "event", "call", "call", "event", "wait"]
    assert told == once * (WARM_UPS + 3)


def test_launches_are_timed_where_they_are_what_is_asked(told):
    seconds_per_call([lambda: told.append("call")], CUDA, 1, warm_seconds=0, launches=True)
    assert told == ["event", "call", "event", "wait"] * (WARM_UPS + 1)


def test_a_gpu_is_warm_after_as_many_calls_as_that_takes(told):
    seconds_per_call([lambda: told.append("call")], CUDA, 2, warm_seconds=0.039)
    assert told.count("call") == 10 + 2


@pytest.mark.parametrize("num_bytes", [1 << 20, 5 << 20, 33 << 20, 1 << 30])
def test_inputs_are_out_of_the_cache_when_their_turn_comes_again(num_bytes):
    sets = rotations(num_bytes)
    assert (sets - 1) * num_bytes > L2_BYTES
    assert sets <= 64


class Played:
    """An engine whose steps take a second each and overlap, on a clock of its own."""

    def __init__(self, monkeypatch):
        self.steps, self.waits = 0, []
        monkeypatch.setattr(session.time, "perf_counter", lambda: float(self.steps))
        monkeypatch.setattr(profiling, "synchronise", lambda device: self.waits.append(self.steps))
        self.core = self
        self.pool = GraphPool(None, GraphSizes((4,), (4,)), None, None)
        self.pool._graphs, self.pool._ready = {4: "a graph"}, (4,)
        forward = SimpleNamespace(pools=(self.pool,))
        self._executor = SimpleNamespace(_runner=SimpleNamespace(_forward=forward))

    def session(self, **config):
        info = SimpleNamespace(config=EngineConfig("a model", **config))
        return Session(SimpleNamespace(_core=self, info=info), CUDA)

    def step(self):
        self.steps += 1
        return SimpleNamespace(token_ids=[1] * (3 if self.steps < 20 else 2))


def test_windows_follow_each_other_without_waiting_for_the_device(monkeypatch):
    played = Played(monkeypatch)
    opened = played.session()
    found = opened.steady(3, warm=2, windows=3, steps=4)
    assert (found.wall, found.tokens, found.rates) == ([1.0] * 3, [3] * 3, [3.0] * 3)
    assert (played.steps, played.waits) == (14, [])
    with pytest.raises(RuntimeError, match="steps of 3 sequences drew 2 to 3 tokens"):
        opened.steady(3, warm=2, windows=3, steps=4)


def test_no_step_of_before_is_recorded(monkeypatch):
    played = Played(monkeypatch)
    seen = []

    class Profile:
        def __init__(self, activities):
            pass

        def __enter__(self):
            seen.append(("begins", played.steps, list(played.waits)))
            return self

        def __exit__(self, *_):
            seen.append(("ends", played.steps, list(played.waits)))

        def events(self):
            spans = {"void at::native::fill<4>()": (0.0, 0.5e6), "attend": (0.5e6, 2e6), "launch": (0.0, 9e6)}
            kinds = {"launch": torch.autograd.DeviceType.CPU}
            for name, (start, end) in spans.items():
                kind = kinds.get(name, torch.autograd.DeviceType.CUDA)
                yield SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))

    monkeypatch.setattr("torch.profiler.profile", Profile)
    opened = played.session()
    opened.skip(5)
    found = profiled(CUDA, lambda: opened.skip(4), 4)
    assert found.busy == 0.5
    assert found.words == "of the device's time: attend 75.0 %, fill<4>() 25.0 %"
    assert seen == [("begins", 5, [5]), ("ends", 9, [5, 9])]


def test_kernels_are_told_in_short_names():
    assert short("void at::native::(anonymous namespace)::cat<4>(int)") == "cat<4>(int)"
    assert len(short("gemm<" + 300 * "a" + ">")) == profiling.LONGEST


def test_steps_without_the_graph_that_was_to_be_there_are_a_failure(monkeypatch):
    played = Played(monkeypatch)
    played.pool.failures = {8: "operation not permitted when stream is capturing"}
    with pytest.raises(
        RuntimeError, match="no CUDA graph of decode steps of 8 sequences was captured: operation not permitted"
    ):
        played.session().steady(3, warm=0, windows=1, steps=1)
    assert played.session(enforce_eager=True).steady(3, warm=0, windows=1, steps=1).tokens == [3]
    played.pool.failures, played.pool._ready = {}, ()
    with pytest.raises(RuntimeError, match="no CUDA graph was captured"):
        played.session().steady(3, warm=0, windows=1, steps=1)


@pytest.mark.parametrize("scale", [FULL, TINY], ids=lambda scale: scale.name)
def test_what_is_recorded_lies_in_the_middle_of_what_is_timed(scale):
    before, steps = recorded_steps(scale)
    assert steps > 0
    assert abs((before + steps / 2) - (scale.warm + scale.windows * scale.steps / 2)) <= 0.5


def test_the_middle_of_what_is_timed_has_the_context_that_the_limit_is_for():
    for batch in FULL.batches:
        filled = prompt_length(FULL, batch) + batch * FULL.context // 8192 // 2
        assert filled + FULL.warm + FULL.windows * FULL.steps // 2 == FULL.context
