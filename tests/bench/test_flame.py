"""The bench of where a token's time goes adds stacks up as it says, and names whose code they are."""

from __future__ import annotations

import pytest

from tests.bench.flame import Frame, Profile, Samples, Streamed, _frame, _grow, markdown, profile_of, tokens_within

FOLDED = """\
thread (0x7f);run (threading.py:982);step (engine/core.py:10);schedule (engine/scheduler/scheduler.py:5) 30
thread (0x7f);run (threading.py:982);step (engine/core.py:12);launch (/tree/engine/worker/runner.py:7) 50
thread (0x8f);run_forever (asyncio/base_events.py:640) 20
"""


def test_a_process_shares_its_time_out_among_its_stacks() -> None:
    frames: dict[str, Frame] = {}
    _grow(frames, FOLDED, us=500.0)
    assert {name: round(frame.us) for name, frame in frames.items()} == {
        "step · core": 400,
        "run_forever · base_events.py": 100,
    }
    step = frames["step · core"]
    assert {name: round(frame.us) for name, frame in step.called.items()} == {
        "schedule · scheduler": 150,
        "launch · runner": 250,
    }
    assert step.room == step.called["launch · runner"].room == "engine"


@pytest.mark.parametrize(
    ("call", "shown", "room"),
    [
        ("Router.route (cluster/router/router.py:3)", "Router.route · router", "cluster"),
        ("forward (/usr/lib/python3/site-packages/torch/nn/functional.py:3)", "forward · functional.py", "elsewhere"),
        ("run (/usr/lib/python3/site-packages/engine/x.py:3)", "run · x.py", "elsewhere"),
        ("Thread.run (threading.py:982)", None, ""),
        ("thread (0x7f00): MainThread", None, ""),
    ],
)
def test_a_frame_tells_whose_code_it_is(call: str, shown: str | None, room: str) -> None:
    assert _frame(call) == (shown, room)


def test_a_stream_counts_for_as_long_as_it_was_seen() -> None:
    streams = [Streamed(0.0, 10.0, 100), Streamed(8.0, 12.0, 8), Streamed(20.0, 30.0, 50)]
    assert tokens_within(streams, 5.0, 10.0) == pytest.approx(50 + 4)


def test_cpu_is_told_per_token_and_idle_processes_are_one() -> None:
    names = {1: "command", 2: "replica", 3: "controller", 4: "router"}
    samples = Samples(100.0, 110.0, names, {1: 0.01, 2: 5.0, 3: 0.02, 4: 0.5}, {2: FOLDED})
    found = profile_of("now", samples, tokens=1000.0)
    assert {name: round(frame.us) for name, frame in found.processes.items()} == {
        "replica": 5000,
        "router": 500,
        "others": 30,
    }
    assert round(found.processes["replica"].called["step · core"].us) == 4000
    assert (found.tokens, found.seconds) == (1000, 10.0)


def test_the_table_has_every_process_of_every_tree() -> None:
    before = Profile("before", 400, 2.0, {"replica": Frame(us=600.0), "router": Frame(us=100.0)})
    now = Profile("now", 900, 3.0, {"replica": Frame(us=300.0), "gateway": Frame(us=50.0)})
    lines = markdown([before, now]).splitlines()
    assert "| CPU a token, us | before | now |" in lines
    assert "| replica | 600 | 300 |" in lines
    assert "| gateway | 0 | 50 |" in lines
    assert "| all | 700 | 350 |" in lines
    assert "| tokens/s | 200 | 300 |" in lines
