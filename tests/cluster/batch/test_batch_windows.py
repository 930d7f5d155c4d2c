"""The time that a batch has, whatever clocks say."""

import pytest

from cluster.batch.server.limits import GRACE, KEEP_SECONDS, CompletionWindows
from tests.cluster.batch.store_lab import NOW, batch_of, keep

DAY = 24 * 3600


class Clocks:
    """Of one machine: its time of day, and the clocks of processes, which begin anew with each."""

    def __init__(self, store):
        self._store = store
        self.time_of_day = NOW + 100.0
        self.steady = 0.0

    def pass_by(self, seconds, jump=0.0):
        self.steady += seconds
        self.time_of_day += seconds + jump

    def runner(self):
        begun = self.steady
        windows = CompletionWindows(self._store.root, lambda: self.steady - begun, lambda: self.time_of_day)
        windows.observe(self._store.batches.unended())
        return windows


def begun_at(store, created_at, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("cluster.batch.server.ids.time.time_ns", lambda: int(created_at * 10**9))
        return batch_of(store, keep(store))


@pytest.mark.parametrize("jump", [-2 * DAY, 2 * DAY])
def test_a_time_of_day_that_jumps_ends_no_batch_and_lets_none_live_longer(store, monkeypatch, jump):
    clocks = Clocks(store)
    old = begun_at(store, clocks.time_of_day, monkeypatch)
    windows = clocks.runner()
    clocks.pass_by(3600, jump)
    windows.observe(store.batches.unended())
    new = begun_at(store, clocks.time_of_day, monkeypatch)  # by a router of that machine
    windows.observe(store.batches.unended())
    for hours in range(1, 24):
        assert not windows.is_over(old) and not windows.is_over(new), hours
        windows.observe(store.batches.unended())
        clocks.pass_by(3600)
    assert windows.is_over(old) and not windows.is_over(new)
    clocks.pass_by(3600)
    assert windows.is_over(new)


def test_the_time_between_two_runners_counts_but_for_an_hour(store, monkeypatch):
    clocks = Clocks(store)
    batch = begun_at(store, clocks.time_of_day, monkeypatch)
    clocks.runner()
    clocks.pass_by(10 * 3600)
    windows = clocks.runner()
    clocks.pass_by(13.9 * 3600)
    assert not windows.is_over(batch)
    clocks.pass_by(0.2 * 3600)
    assert windows.is_over(batch)
    assert clocks.runner().is_over(batch) is False, "who had it last may have seen a wrong time of day"
    late = Clocks(store)
    late.pass_by(5 * DAY)
    windows = late.runner()
    assert not windows.is_over(batch)
    late.pass_by(3601)
    assert windows.is_over(batch)


def test_runners_that_die_again_and_again_give_a_batch_no_time(store, monkeypatch):
    clocks = Clocks(store)
    batch = begun_at(store, clocks.time_of_day, monkeypatch)
    clocks.pass_by(2 * DAY)
    lives = 0
    while not (windows := clocks.runner()).is_over(batch):
        clocks.pass_by(KEEP_SECONDS + 1)
        windows.observe(store.batches.unended())
        clocks.pass_by(DAY)
        lives += 1
    assert lives * KEEP_SECONDS == pytest.approx(GRACE, rel=0.1)


def test_what_was_used_is_told_by_the_time_of_day_where_it_is_damaged(store, monkeypatch, caplog):
    clocks = Clocks(store)
    batch = begun_at(store, clocks.time_of_day, monkeypatch)
    store.root.write("used.json", b"{")
    clocks.pass_by(22 * 3600)
    windows = clocks.runner()
    assert "used.json is damaged" in caplog.text
    clocks.pass_by(2 * 3600 + 1)
    assert windows.is_over(batch)
