"""How the GPU bench takes time: what lies between its events, and at which length what is timed lies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.bench.gpu import session
from tests.bench.gpu.part_decode import prompt_length, recorded_steps
from tests.bench.gpu.scale import FULL, TINY
from tests.bench.gpu.session import Session, busy_seconds
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
        monkeypatch.setattr(session, "synchronise", lambda device: self.waits.append(self.steps))
        self.core = self

    def step(self):
        self.steps += 1
        return SimpleNamespace(token_ids=[1] * (3 if self.steps < 20 else 2))


def test_windows_follow_each_other_without_waiting_for_the_device(monkeypatch):
    played = Played(monkeypatch)
    opened = Session(SimpleNamespace(_core=played), CUDA)
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
            span = SimpleNamespace(start=0.0, end=2e6)
            return [SimpleNamespace(device_type=torch.autograd.DeviceType.CUDA, time_range=span)]

    monkeypatch.setattr("torch.profiler.profile", Profile)
    opened = Session(SimpleNamespace(_core=played), CUDA)
    opened.skip(5)
    assert busy_seconds(opened, 4) == 0.5
    assert seen == [("begins", 5, [5]), ("ends", 9, [5, 9])]


@pytest.mark.parametrize("scale", [FULL, TINY], ids=lambda scale: scale.name)
def test_what_is_recorded_lies_in_the_middle_of_what_is_timed(scale):
    before, steps = recorded_steps(scale)
    assert steps > 0
    assert abs((before + steps / 2) - (scale.warm + scale.windows * scale.steps / 2)) <= 0.5


def test_the_middle_of_what_is_timed_has_the_context_that_the_limit_is_for():
    for batch in FULL.batches:
        filled = prompt_length(FULL, batch) + batch * FULL.context // 8192 // 2
        assert filled + FULL.warm + FULL.windows * FULL.steps // 2 == FULL.context
