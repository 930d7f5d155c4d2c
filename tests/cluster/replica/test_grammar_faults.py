"""A grammar that is at odds with itself, or too dear, ends its own request, and the server's own log tells why."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

import pytest
from typing_extensions import override

from cluster.errors import ApiError
from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar, GrammarBudget
from engine.report import Ints
from engine.request import GrammarState
from engine.sampling_params import StructuredOutput
from tests.cluster.cluster_lab import Lab, long_request, oracle, until
from tests.engine.engine_driver import request

BYSTANDERS = [long_request(f"r{i}", seed=i) for i in range(8)]
SCHEMA = '{"type":"object","properties":{"secret":{"type":"string","maxLength":200}}}'
WANTED = StructuredOutput("json_schema", SCHEMA)

FORM = 'json_schema {"type": "object", "properties": {"#0": {"type": "string", "maxLength": 200}}}'


class AtOdds(GrammarState):
    """Allows every token, and refuses the third."""

    def __init__(self) -> None:
        self._taken = 0

    @override
    def accept(self, token_id: int) -> bool:
        self._taken += 1
        return self._taken < 3

    @override
    def fill(self, bits: Ints) -> None:
        bits[:] = -1

    @property
    @override
    def finished(self) -> bool:
        return False


class Dear(AtOdds):
    """Uses up the budget with its third token."""

    def __init__(self, budget: GrammarBudget, where: str) -> None:
        super().__init__()
        self._budget = budget
        self._where = where

    @override
    def accept(self, token_id: int) -> bool:
        self._spend("accept")
        return super().accept(token_id) or True

    @override
    def fill(self, bits: Ints) -> None:
        self._spend("fill")
        super().fill(bits)

    def _spend(self, where: str) -> None:
        if where == self._where and self._taken == 2:
            self._budget.charge(1000.0)
            self._budget.check()


class Made(CompiledGrammar):
    """Makes states that are at odds, or dear where it is said."""

    def __init__(self, where: str = "") -> None:
        self._where = where

    @override
    def state(self, budget: GrammarBudget | None = None) -> GrammarState:
        return Dear(budget or GrammarBudget(), self._where) if self._where else AtOdds()


class Grammars:
    """Compiles at once what it was given."""

    def __init__(self, made: CompiledGrammar | Exception) -> None:
        self._made = made

    def submit(self, wanted: StructuredOutput, owner: str = "") -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        if isinstance(self._made, Exception):
            future.set_exception(self._made)
        else:
            future.set_result(self._made)
        return future

    def spent(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class Nothing(Made):
    """Makes states that allow nothing, or only token 7, at their third token."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self._only = only

    @override
    def state(self, budget: GrammarBudget | None = None) -> GrammarState:
        return Narrow(self._only)


class Narrow(GrammarState):
    def __init__(self, only: int | None) -> None:
        self._only = only
        self._taken = 0

    @override
    def accept(self, token_id: int) -> bool:
        self._taken += 1
        return True

    @override
    def fill(self, bits: Ints) -> None:
        bits[:] = -1 if self._taken < 2 else 0
        if self._taken >= 2 and self._only is not None:
            bits[0] = 1 << self._only

    @property
    @override
    def finished(self) -> bool:
        return False


async def failed(grammars: Grammars, n: int = 1, overlaps: bool = False, **rules) -> ApiError:
    """Run a request with structured output beside others, which must get their tokens; return its error."""
    async with Lab(async_scheduling=overlaps) as lab:
        replica = await lab.start("a", pace=0.001, grammars=grammars)
        running = [asyncio.create_task(lab.collect(one)) for one in BYSTANDERS]
        with pytest.raises(ApiError) as caught:
            await lab.collect(request("bad", 5, max_tokens=40, temperature=1.0, n=n, structured=WANTED, **rules))
        assert await asyncio.gather(*running) == [oracle(one) for one in BYSTANDERS]
        await until(lambda: replica.core.num_requests == replica.held_blocks == 0)
    return caught.value


def told(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "cluster.router.reports"]


async def test_a_grammar_at_odds_with_itself_is_told_in_the_routers_log_with_its_form(caplog):
    error = await failed(Grammars(Made()))
    assert (error.code, error.status, error.retryable) == ("internal_error", 500, False)
    assert [FORM in one and "GrammarError" in one for one in told(caplog)] == [True]
    assert "secret" not in caplog.text


RULES = [{"allowed_token_ids": (1, 2, 3)}, {"bad_words": ("seven",), "bad_words_ids": ((7,),)}]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("rules", RULES, ids=["allowed", "bad words"])
async def test_rules_that_leave_nothing_of_what_a_grammar_allows_are_the_clients_error(rules, overlaps, caplog):
    error = await failed(Grammars(Nothing(only=7)), n=2, overlaps=overlaps, **rules)
    assert (error.code, error.status, error.retryable) == ("no_token_left", 400, False)
    assert "what the output must match together leave no token" in error.message
    assert told(caplog) == []


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("rules", [{}, *RULES], ids=["alone", "allowed", "bad words"])
async def test_a_grammar_that_allows_nothing_is_our_error_whatever_else_was_asked_for(rules, overlaps, caplog):
    error = await failed(Grammars(Nothing()), overlaps=overlaps, **rules)
    assert (error.code, error.status, error.retryable) == ("internal_error", 500, False)
    assert [FORM in one for one in told(caplog)] == [True]


@pytest.mark.parametrize("made", [KeyError("secret"), InvalidRequestError("no", "structured", "internal_error")])
async def test_a_grammar_that_cannot_be_made_for_no_fault_of_the_clients_is_told_likewise(made, caplog):
    error = await failed(Grammars(made))
    assert (error.code, error.status) == ("internal_error", 500)
    assert [FORM in one for one in told(caplog)] == [True]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("code", "status", "retryable"), [("not_supported", 400, False), ("rate_limit_exceeded", 429, True)]
)
async def test_a_refusal_of_what_the_client_asked_for_is_not_told(code, status, retryable, caplog):
    with caplog.at_level(logging.WARNING):
        error = await failed(Grammars(InvalidRequestError("no such schema", "structured", code)))
    assert (error.code, error.status, error.retryable) == (code, status, retryable)
    assert told(caplog) == []


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("where", ["accept", "fill"])
@pytest.mark.parametrize("n", [1, 5])
async def test_a_grammar_that_uses_up_its_budget_ends_its_own_request_by_that_name(where, n, overlaps, caplog):
    error = await failed(Grammars(Made(where)), n, overlaps)
    assert (error.code, error.status, error.retryable) == ("grammar_too_slow", 400, False)
    assert "in one way only" in error.message
    assert told(caplog) == []
