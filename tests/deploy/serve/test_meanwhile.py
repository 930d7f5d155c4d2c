"""Work beside the main thread: it has ended where it was left, and its error comes where it is waited for."""

from __future__ import annotations

import threading

import pytest

from deploy.serve.meanwhile import Meanwhile


def test_the_work_runs_beside_and_has_ended_afterwards() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()
        done.set()

    with Meanwhile(work):
        begun.wait()
        assert not done.is_set()
        go_on.set()
    assert done.is_set()


def test_an_error_is_raised_where_the_work_is_waited_for() -> None:
    def work() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"), Meanwhile(work) as beside:
        beside.wait()


def test_what_ends_the_body_comes_before_the_works_own_error() -> None:
    def work() -> None:
        raise ValueError("no such model")

    with pytest.raises(KeyboardInterrupt), Meanwhile(work):
        raise KeyboardInterrupt
