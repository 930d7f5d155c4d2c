"""What a grammar costs is bounded: it is tried out before it is taken, and a request's choices share one budget."""

import json
import time

import numpy as np
import pytest

from engine.errors import InvalidRequestError
from engine.grammar.base import (
    BASE_TIME,
    TOKEN_TIME,
    CompiledGrammar,
    GrammarBudget,
    GrammarState,
)
from engine.grammar.compile_service import GrammarService
from engine.grammar.helper import CompileLimits
from engine.grammar.texts import grammar_text
from engine.grammar.xgrammar_backend import try_out
from engine.inputs.grammar_masks import PreparedGrammar, grammar_states
from engine.request import Request
from engine.sampling_params import SamplingParams, StructuredOutput
from tests.grammar_walk import END, WORDS, allowed, byte_vocabulary, compiled

AMBIGUOUS = "root ::= s\ns ::= s s s | s s | [a-z]\n"
DEAR = [
    AMBIGUOUS,
    'root ::= "x" s\ns ::= s s | "a" | "b" | s s s s\n',
    "root ::= (s | t)\ns ::= s s | [a-z] | t\nt ::= t t t | [a-z] | s\n",
]
USUAL = [
    StructuredOutput("json_object"),
    StructuredOutput("json_schema", "{}"),
    StructuredOutput("json_schema", '{"type": "string", "maxLength": 200}'),
    StructuredOutput(
        "json_schema", '{"type": "array", "items": {"type": "string", "format": "uri"}, "maxItems": 900}'
    ),
    StructuredOutput(
        "json_schema", json.dumps({"properties": {f"name {n}": {"type": "string"} for n in range(300)}})
    ),
    StructuredOutput("regex", "(a+)+b"),
    StructuredOutput("regex", "(a*)*(a*)*b"),
    StructuredOutput("choice", json.dumps([f"value {number}" for number in range(500)])),
    StructuredOutput("grammar", 'root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"\n'),
]
WANTED = StructuredOutput("grammar", AMBIGUOUS)


@pytest.fixture(scope="module")
def service():
    one = GrammarService(lambda: WORDS, [END], CompileLimits(deadline=20.0))
    yield one
    one.close()


@pytest.mark.parametrize("text", DEAR, ids=range(len(DEAR)))
def test_a_grammar_that_grows_dearer_with_each_token_is_refused_before_it_is_taken(service, text):
    with pytest.raises(InvalidRequestError, match="in one way only") as caught:
        service.compile(StructuredOutput("grammar", text))
    assert (caught.value.param, caught.value.code) == ("structured", "grammar_too_slow")


@pytest.mark.parametrize("wanted", USUAL, ids=lambda wanted: f"{wanted.kind} {wanted.text[:30]}")
def test_what_is_usual_is_taken(wanted):
    try_out(byte_vocabulary(), compiled(grammar_text(wanted)))


class Strange(CompiledGrammar, GrammarState):
    """Allows what it does not take."""

    finished = False

    def state(self, budget=None):
        return self

    def accept(self, token_id):
        return False

    def fill(self, bits):
        bits[:] = 3


def test_a_grammar_at_odds_with_itself_is_not_taken():
    with pytest.raises(InvalidRequestError) as caught:
        try_out(byte_vocabulary(), Strange())
    assert caught.value.code == "internal_error"


def spend(states: dict[int, GrammarState], most: int) -> tuple[int, float]:
    """Let choices draw in turns until one is stopped; return their tokens and the CPU time."""
    begun, tokens = time.thread_time(), 0
    with pytest.raises(InvalidRequestError) as caught:
        for _ in range(most):
            for state in states.values():
                assert state.accept(allowed(state)[tokens % 26])
                tokens += 1
    assert caught.value.code == "grammar_too_slow"
    return tokens, time.thread_time() - begun


@pytest.mark.parametrize("prepares", [False, True])
def test_choices_share_one_budget(prepares):
    grammar = compiled(AMBIGUOUS)
    request = Request("r", (1,), SamplingParams(n=16, structured=WANTED))
    states = grammar_states(request, PreparedGrammar(grammar, request) if prepares else grammar)
    assert len(states) == 16
    tokens, took = spend(states, most=400)
    assert took < 3 * (BASE_TIME + tokens * TOKEN_TIME), "the last token may be dear itself"
    for state in states.values():
        with pytest.raises(InvalidRequestError, match="takes too long"):
            state.fill(np.zeros(byte_vocabulary().num_words, np.int32))
        with pytest.raises(InvalidRequestError, match="takes too long"):
            state.accept(ord("a"))


def test_another_request_with_the_same_grammar_has_its_own():
    grammar = compiled(AMBIGUOUS)
    spend({0: grammar.state()}, most=500)
    assert grammar.state().accept(ord("a"))


@pytest.mark.parametrize("n", [1, 16])
def test_a_request_that_goes_on_elsewhere_brings_no_more_cost_than_it_may_have(n):
    log = tuple(b"abcdefghij" * 40)
    request = Request("r", (1,), SamplingParams(n=n, structured=WANTED), resume=dict.fromkeys(range(n), log))
    begun = time.thread_time()
    with pytest.raises(InvalidRequestError) as caught:
        PreparedGrammar(compiled(AMBIGUOUS), request)
    assert caught.value.code == "grammar_too_slow"
    assert time.thread_time() - begun < 3 * (BASE_TIME + len(log) * TOKEN_TIME)


def test_a_long_output_may_take_long_but_saves_nothing_up():
    budget = GrammarBudget(base=1.0, each=0.5)
    for _ in range(100):
        budget.charge(0.125)
        budget.charge(0.125, tokens=1)
        budget.check()
    budget.charge(0.9)
    budget.check()
    budget.charge(0.2)
    with pytest.raises(InvalidRequestError):
        budget.check()
