"""The short form of `make soak` (FAULTS 43): streams, aborts and kills by a seed, with every invariant on."""

from __future__ import annotations

import pytest

from tests.bench.siege import SAME
from tests.bench.soak import ABORTED, Soak, slope_of
from tests.e2e.harness import App


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.long)])
async def test_streams_aborts_and_random_kills_break_no_promise(demo_app: App, seconds: int) -> None:
    report = await Soak(demo_app, seconds, streams=12, tokens=120, seed=7, kill_every=2).run()
    assert not report.problems
    assert report.victims, "nothing was killed"
    assert report.outcomes[ABORTED], "nobody gave up"
    assert report.outcomes[SAME] >= 0.95 * (report.outcomes.total() - report.outcomes[ABORTED])
    assert report.samples > 20
    assert not report.missed


def test_a_leak_shows_as_a_slope_and_a_warm_up_does_not() -> None:
    flat = [(float(at), 300.0 + (at % 3) - 80.0 * (at < 30)) for at in range(300)]
    assert abs(slope_of(flat) or 0.0) < 0.1
    leaking = [(at, value + 0.05 * at) for at, value in flat]
    slope = slope_of(leaking)
    assert slope is not None
    assert abs(slope - 3.0) < 0.1
    assert slope_of(flat[:150]) is None, "too short to say"
