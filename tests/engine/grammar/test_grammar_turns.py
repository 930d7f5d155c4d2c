"""Whose grammar is compiled next, and how long a refusal is remembered."""

import pytest

from engine.errors import GrammarError, InvalidRequestError
from engine.grammar.refused import KEPT_FOR, MOST, Refused
from engine.grammar.turns import Turns
from engine.sampling_params import StructuredOutput


def run(turns: Turns[str], costs: dict[str, float], most: int = 100) -> list[str]:
    """Take and charge all that waits; return the jobs in their order."""
    order = []
    while turns and len(order) < most:
        owner, job = turns.take()
        order.append(job)
        turns.charge(owner, costs[owner])
    return order


def turns_of(**jobs: int) -> Turns[str]:
    turns: Turns[str] = Turns(200)
    for owner, count in jobs.items():
        for number in range(count):
            assert turns.add(owner, f"{owner}{number}")
    return turns


def test_who_comes_after_a_hundred_jobs_of_another_owner_waits_for_one():
    assert run(turns_of(a=100, b=1), {"a": 8.0, "b": 0.1})[:2] == ["a0", "b0"]


def test_time_is_shared_and_not_the_number_of_jobs():
    order = run(turns_of(a=10, b=40), {"a": 4.0, "b": 1.0})
    assert 7 <= sum(job.startswith("b") for job in order[:10]) <= 8
    assert [job for job in order if job.startswith("a")] == [f"a{number}" for number in range(10)]


def test_who_paused_has_saved_nothing_up_and_owes_nothing_for_others():
    turns = turns_of(a=1, b=50)
    run(turns, {"a": 1.0, "b": 1.0}, most=30)
    for number in range(20):
        turns.add("a", f"late{number}")
        turns.add("new", f"new{number}")
    order = run(turns, {"a": 1.0, "b": 1.0, "new": 1.0}, most=12)
    assert [sum(job.startswith(owner) for job in order) for owner in ("late", "b", "new")] == [4, 4, 4]


def test_one_owner_may_have_so_many_and_no_job_twice():
    turns: Turns[str] = Turns(2)
    assert [turns.add("a", job) for job in ("x", "y", "z", "y")] == [True, True, False, True]
    assert turns.add("b", "x")
    assert run(turns, {"a": 1.0, "b": 1.0}) == ["x", "x", "y"]
    assert not turns


def test_owners_who_are_gone_are_forgotten():
    turns: Turns[str] = Turns(2)
    for number in range(1000):
        turns.add(f"owner {number}", "x")
        run(turns, {f"owner {number}": 1.0})
        turns.add("steady", "y")
        run(turns, {"steady": 0.5})
    assert len(turns._used) < 10


WANTED = [StructuredOutput("regex", str(number)) for number in range(MOST + 1)]


def test_a_refusal_is_remembered_for_a_while():
    now = [0.0]
    refused = Refused(lambda: now[0])
    refused.add(WANTED[0], InvalidRequestError("no", "structured", "not_supported"))
    found = refused.find(WANTED[0])
    assert found is not None
    assert (str(found), found.param, found.code) == ("no", "structured", "not_supported")
    assert refused.find(StructuredOutput("choice", "0")) is None
    now[0] = KEPT_FOR + 1
    assert refused.find(WANTED[0]) is None


@pytest.mark.parametrize(
    "error",
    [GrammarError("x"), *(InvalidRequestError("x", code=code) for code in ("internal_error", "shutting_down"))],
)
def test_what_says_nothing_of_the_wish_is_not_remembered(error):
    refused = Refused()
    refused.add(WANTED[0], error)
    assert refused.find(WANTED[0]) is None


def test_the_oldest_refusals_are_forgotten():
    refused = Refused()
    for wanted in WANTED:
        refused.add(wanted, InvalidRequestError("no"))
    assert [refused.find(WANTED[number]) is None for number in (0, 1, MOST)] == [True, False, False]
