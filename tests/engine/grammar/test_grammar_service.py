"""Compiling is limited and killable, callers take turns, results are kept within bounds, no process is left."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from engine.errors import GrammarError, InvalidRequestError
from engine.grammar import helper
from engine.grammar.compile_service import MAX_REFUSED, REFUSED_SECONDS, GrammarService, OwnerQueue, RefusalCache
from engine.grammar.helper import CompileLimits
from engine.inputs.grammar_masks import PreparedGrammar, grammar_states
from engine.request import Request
from engine.sampling_params import SamplingParams, StructuredOutput
from tests.grammar_walk import END, WORDS, allowed

QUICK = StructuredOutput("regex", "[a-z]{1,9}")


@pytest.fixture(scope="module")
def service():
    one = GrammarService(lambda: WORDS, [END], CompileLimits(deadline=20.0, room=1 << 30, kept=200_000))
    yield one
    pid = one.helper_pid
    one.close()
    one.close()
    assert pid is None or not psutil.pid_exists(pid)


def choice(*strings):
    return StructuredOutput("choice", json.dumps(strings))


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (StructuredOutput("regex", "[a-z]{1,3}"), "abc", "abcd"),
        (StructuredOutput("json_object"), '{"a": [1, null]}', "[1]"),
        (StructuredOutput("json_schema", '{"type": "integer", "minimum": 10}'), "12", "9"),
        (choice("yes", 'n"o\n', "日本"), 'n"o\n', "no"),
        (StructuredOutput("grammar", 'root ::= "(" root ")" | "x"\n'), "((x))", "((x)"),
        (StructuredOutput("calls_or_json", '{"calls": [["<f>", "</f>"]]}'), "<f>{}</f><f>{}</f>", "<f>{}"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_each_kind_takes_what_matches_and_nothing_else(service, wanted, good, bad):
    grammar = service.compile(wanted)
    for text, fits in ((good, True), (bad, False)):
        state = grammar.state()
        assert all(state.accept(token) for token in [*text.encode(), END]) == fits
        assert state.finished == fits
    state = grammar.resume([*good.encode(), END])
    assert not state.accept(ord("a"))
    assert allowed(state) == []


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput("regex", "("),
        StructuredOutput("json_schema", '{"not": {}}'),
        StructuredOutput("choice", '["a", 1]'),
        StructuredOutput("choice", "[]"),
        StructuredOutput("choice", "a"),
        StructuredOutput("choice", '["\\ud800"]'),
        StructuredOutput("choice", json.dumps([str(n) for n in range(1001)])),
        StructuredOutput("grammar", "root ::= "),
        StructuredOutput("grammar", "root ::= other\n"),
        StructuredOutput("grammar", "root ::= root\n"),
        StructuredOutput("grammar", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    ],
    ids=lambda wanted: f"{wanted.kind} {wanted.text[:12]!r}",
)
def test_what_cannot_be_read_is_refused_and_the_next_one_compiles(service, wanted):
    with pytest.raises(InvalidRequestError) as caught:
        service.compile(wanted)
    assert caught.value.param == "structured"
    assert str(caught.value)
    assert service.compile(QUICK) is not None


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a*)*(a*)*b", "[a-z]{1,100000}", "(a{0,400}b?){0,400}", "(a?){500}a{500}"]
)
def test_nasty_patterns_neither_hang_nor_grow(service, pattern):
    begun = time.monotonic()
    state = service.compile(StructuredOutput("regex", pattern)).state()
    for _ in range(60):
        token = allowed(state)[0]
        state.accept(token)
        if state.finished:
            break
    assert time.monotonic() - begun < 15


def test_equal_wishes_are_compiled_once_and_kept(service):
    wanted = choice("once", "only")
    assert service.compile(wanted) is service.compile(choice("once", "only"))


def test_what_is_kept_is_bounded_whatever_comes(service):
    for number in range(300):
        service.compile(choice(f"value {number}"))
    assert service.num_bytes <= 200_000
    first = service.submit(choice("value 299"))
    assert first.done(), "the latest is kept"


def test_a_helper_that_is_killed_is_replaced(service):
    service.compile(choice("before"))
    former = service.helper_pid
    os.kill(former, signal.SIGKILL)
    assert service.compile(choice("after the kill")) is not None
    assert service.helper_pid not in (None, former)


def hang(_vocabulary, wanted):
    """A compile that never comes back, nor listens to anybody, for one word; the real one for others."""
    if "hang" in wanted.text:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        while True:
            time.sleep(1)
    if "die" in wanted.text:
        os.kill(os.getpid(), signal.SIGKILL)
    if "burn" in wanted.text:
        os.kill(os.getpid(), signal.SIGXCPU)  # as the kernel does at the limit of CPU time
    return "text", 'root ::= "x"\n', ""


def hanging_serve(*args):
    """The helper's main function with that compile."""
    helper._answer, helper.Vocabulary = hang, lambda *_: None  # it needs no library, which takes long to import
    helper.serve(*args)


@pytest.fixture(scope="module")
def hanging():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helper, "serve", hanging_serve)
        one = GrammarService(lambda: WORDS, [END], CompileLimits(deadline=0.5, waiting=3))
        yield one
        one.close()


@pytest.fixture(scope="module")
def dying():
    """The same with all the time that a busy machine takes to start a helper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helper, "serve", hanging_serve)
        one = GrammarService(lambda: WORDS, [END], CompileLimits(deadline=30, waiting=3))
        yield one
        one.close()


def test_a_compile_that_takes_too_long_is_killed_and_refused_by_name(hanging):
    assert hanging.compile(choice("warm")) is not None
    former = hanging.helper_pid
    with pytest.raises(InvalidRequestError, match=r"choice was not compiled within 0\.5 s"):
        hanging.compile(choice("hang"))
    assert not psutil.pid_exists(former)
    assert hanging.compile(choice("next")) is not None


def test_a_compile_that_ends_its_process_is_tried_again_and_refused(dying):
    with pytest.raises(InvalidRequestError, match="ended its process"):
        dying.compile(choice("die"))
    assert dying.compile(choice("next one")) is not None


def test_a_compile_that_uses_up_its_cpu_time_is_not_tried_again(dying):
    dying.compile(choice("warm"))
    with pytest.raises(InvalidRequestError, match="ended its process by its time or memory"):
        dying.compile(choice("burn"))
    assert dying.helper_pid is None, "no other helper was started for it"
    assert dying.compile(choice("another one")) is not None


def test_a_refusal_is_remembered_and_costs_nothing_again(dying):
    for text in ("die again", "burn again"):
        with pytest.raises(InvalidRequestError) as first:
            dying.compile(choice(text))
        dying.compile(choice("after " + text[::-1]))
        former = dying.helper_pid
        again = dying.submit(choice(text), "another owner")
        assert again.done()
        assert str(again.exception()) == str(first.value)
        assert dying.helper_pid == former


def test_owners_take_turns_and_those_who_ask_for_too_much_are_turned_away_alone(hanging):
    ended = []
    hanging.compile(choice("warm again"))
    mine = {f"me {n}": hanging.submit(choice(f"hang {n}"), "me") for n in range(3)}
    other = hanging.submit(choice("other"), "somebody else")
    for name, future in (*mine.items(), ("other", other)):
        future.add_done_callback(lambda _, name=name: ended.append(name))
    crowd = [hanging.submit(choice(f"hang {n}, one of many"), "me") for n in range(5)]
    assert crowd[-1].exception().code == "rate_limit_exceeded"
    same = hanging.submit(choice("hang 2"), "third")
    assert same is mine["me 2"]
    for future in (*mine.values(), other):
        future.exception(timeout=30)
    assert ended == ["me 0", "other", "me 2", "me 1"], "a wish comes with the turn of whoever is first"


def test_the_time_of_a_grammar_is_charged_to_who_asked_whether_it_is_refused_or_not(monkeypatch):
    def made(self, wanted):
        time.sleep(0.05)
        raise InvalidRequestError("no such thing")

    monkeypatch.setattr(GrammarService, "_made", made)
    one = GrammarService(lambda: WORDS, [END])
    for text, owner in (("a", "x"), ("b", "x"), ("c", "y"), ("c", "z")):
        assert one.submit(choice(text), owner).exception(timeout=30) is not None
    spent = one.spent()
    one.close()
    assert spent.keys() == {"x", "y"}, "what is remembered costs nobody anything"
    assert (spent["x"] >= 0.1, spent["y"] >= 0.05) == (True, True)


def test_closing_ends_a_compile_and_refuses_what_waits(hanging):
    """The last one to use the service."""
    hanging.compile(choice("warm at last"))
    others = {thread for thread in threading.enumerate() if thread is not hanging._thread}
    pid = hanging.helper_pid
    waiting = [hanging.submit(choice("hang on")), hanging.submit(choice("behind it"))]
    hanging.close()
    assert all(future.exception(timeout=1) is not None for future in waiting)
    assert not psutil.pid_exists(pid)
    assert hanging.submit(choice("late")).exception().code == "shutting_down"
    assert set(threading.enumerate()) <= others


def test_without_the_extra_the_refusal_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    one = GrammarService(lambda: WORDS, [END])
    with pytest.raises(InvalidRequestError, match=r"pip install -e '\.\[structured\]'") as caught:
        one.compile(QUICK)
    one.close()
    assert (caught.value.param, caught.value.code) == ("structured", "not_supported")


def test_a_model_without_an_end_cannot_have_structured_output():
    one = GrammarService(lambda: WORDS, [])
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        one.compile(QUICK)
    one.close()


def test_states_are_prepared_from_the_logs_of_each_choice(service):
    grammar = service.compile(choice("abc", "abd"))
    params = SamplingParams(n=2, structured=choice("abc", "abd"))
    resumed = Request("r", (1,), params, resume={0: (97, 98), 1: (97, 98)})
    states = grammar_states(resumed, PreparedGrammar(grammar, resumed))
    assert states[0] is not states[1]
    assert states[0].accept(ord("c"))
    assert states[1].accept(ord("d"))
    fresh = PreparedGrammar(grammar, Request("r", (1,), params))
    assert fresh.state() is not fresh.state()
    assert fresh.state().accept(97), "states beyond those prepared are made when asked for"
    with pytest.raises(GrammarError, match=r"the 2\. of the output"):
        PreparedGrammar(grammar, Request("r", (1,), params, resume={0: (97, 97)}))


PARENT = """
import os, signal, sys
from engine.grammar.compile_service import GrammarService
from engine.sampling_params import StructuredOutput
service = GrammarService(lambda: [b"a", b""], [1])
service.compile(StructuredOutput("regex", "a{1,9}"))
print(service.helper_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_helper_ends_with_a_parent_that_is_killed():
    run = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr[-2000:]
    try:
        psutil.Process(int(run.stdout)).wait(timeout=10)
    except psutil.NoSuchProcess:
        return


def run(queue: OwnerQueue[str], costs: dict[str, float], most: int = 100) -> list[str]:
    """Take and charge all that waits; return the jobs in their order."""
    order = []
    while queue and len(order) < most:
        owner, job = queue.take()
        order.append(job)
        queue.charge(owner, costs[owner])
    return order


def queue_of(**jobs: int) -> OwnerQueue[str]:
    queue: OwnerQueue[str] = OwnerQueue(200)
    for owner, count in jobs.items():
        for number in range(count):
            assert queue.add(owner, f"{owner}{number}")
    return queue


def test_who_comes_after_a_hundred_jobs_of_another_owner_waits_for_one():
    assert run(queue_of(a=100, b=1), {"a": 8.0, "b": 0.1})[:2] == ["a0", "b0"]


def test_time_is_shared_and_not_the_number_of_jobs():
    order = run(queue_of(a=10, b=40), {"a": 4.0, "b": 1.0})
    assert 7 <= sum(job.startswith("b") for job in order[:10]) <= 8
    assert [job for job in order if job.startswith("a")] == [f"a{number}" for number in range(10)]


def test_who_paused_has_saved_nothing_up_and_owes_nothing_for_others():
    queue = queue_of(a=1, b=50)
    run(queue, {"a": 1.0, "b": 1.0}, most=30)
    for number in range(20):
        queue.add("a", f"late{number}")
        queue.add("new", f"new{number}")
    order = run(queue, {"a": 1.0, "b": 1.0, "new": 1.0}, most=12)
    assert [sum(job.startswith(owner) for job in order) for owner in ("late", "b", "new")] == [4, 4, 4]


def test_one_owner_may_have_so_many_and_no_job_twice():
    queue: OwnerQueue[str] = OwnerQueue(2)
    assert [queue.add("a", job) for job in ("x", "y", "z", "y")] == [True, True, False, True]
    assert queue.add("b", "x")
    assert run(queue, {"a": 1.0, "b": 1.0}) == ["x", "x", "y"]
    assert not queue


def test_owners_who_are_gone_are_forgotten():
    queue: OwnerQueue[str] = OwnerQueue(2)
    for number in range(1000):
        queue.add(f"owner {number}", "x")
        run(queue, {f"owner {number}": 1.0})
        queue.add("steady", "y")
        run(queue, {"steady": 0.5})
    assert len(queue._used) < 10


WANTED = [StructuredOutput("regex", str(number)) for number in range(MAX_REFUSED + 1)]


def test_a_refusal_is_remembered_for_a_while():
    now = [0.0]
    refused = RefusalCache(lambda: now[0])
    refused.add(WANTED[0], InvalidRequestError("no", "structured", "not_supported"))
    found = refused.find(WANTED[0])
    assert found is not None
    assert (str(found), found.param, found.code) == ("no", "structured", "not_supported")
    assert refused.find(StructuredOutput("choice", "0")) is None
    now[0] = REFUSED_SECONDS + 1
    assert refused.find(WANTED[0]) is None


@pytest.mark.parametrize(
    "error",
    [GrammarError("x"), *(InvalidRequestError("x", code=code) for code in ("internal_error", "shutting_down"))],
)
def test_what_says_nothing_of_the_wish_is_not_remembered(error):
    refused = RefusalCache()
    refused.add(WANTED[0], error)
    assert refused.find(WANTED[0]) is None


def test_the_oldest_refusals_are_forgotten():
    refused = RefusalCache()
    for wanted in WANTED:
        refused.add(wanted, InvalidRequestError("no"))
    assert [refused.find(WANTED[number]) is None for number in (0, 1, MAX_REFUSED)] == [True, False, False]
