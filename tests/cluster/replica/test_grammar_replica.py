"""Structured output through a replica: compiled beside the engine, refused by its own error, resumed exactly."""

import asyncio
import gc
from concurrent.futures import Future

import pytest

from cluster.accounts.flight_recorder import Wait
from cluster.replica.core import ReplicaCore
from cluster.replica.sessions import ReplicaFacts, ReplicaTimes
from cluster.wire.replica_messages import Rejected, Report
from cluster.wire.router_messages import Abort
from cluster.wire.translation import submit_message
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import InvalidRequestError
from engine.grammar.xgrammar_backend import Vocabulary
from engine.request import Request
from engine.sampling_params import SamplingParams, StructuredOutput
from tests.cluster.cluster_lab import until
from tests.engine.engine_driver import EOS, VOCAB, expected, request
from tests.fake_executor import FakeExecutor
from tests.simulator.links import connect_local

# Token 0 ends; 1 to 60 are letters and digits.
TOKENS = [b"", *[bytes([code]) for code in b"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWX"]]
WANTED = StructuredOutput("regex", "[a-f]{12}[0-9]{2,6}X")
GRAMMAR = 'root ::= [a-f]{12} [0-9]{2,6} "X"\n'


class Grammars:
    """Compiles when the test says so."""

    def __init__(self):
        self.vocabulary = Vocabulary(TOKENS, [EOS])
        self.asked = []

    def submit(self, wanted, owner=""):
        future = Future()
        self.asked.append((wanted, owner, future))
        return future

    def spent(self):
        return {owner: 0.25 for _, owner, future in self.asked if future.done()}

    def answer(self, text=GRAMMAR):
        self.asked[-1][2].set_result(self.vocabulary.compile(text))

    def close(self):
        for _, _, future in self.asked:
            if not future.done():
                future.set_exception(InvalidRequestError("the server stops", "structured", "shutting_down"))


@pytest.fixture
async def replica():
    config = EngineConfig("fake", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32, block_size=4)
    core = EngineCore(config, FakeExecutor(64, 4, VOCAB), (EOS,), VOCAB, 64)
    facts = ReplicaFacts("a", "fake", 128, VOCAB, 4, 63, (EOS,))
    grammars = Grammars()
    one = ReplicaCore(core, facts, ReplicaTimes(heartbeat=60.0), grammars=grammars)
    one.test_grammars, one.test_flight = grammars, one.flight
    yield one
    await one.close()


def structured(name="s", resume=None, n=1):
    params = SamplingParams(n=n, temperature=1.0, max_tokens=40, structured=WANTED)
    return Request(name, (1, 2, 3), params, seed=5, cache_salt=b"salt", tenant="tenant", resume=resume)


async def outcome(link, keys):
    """Return the tokens of the streams and their reasons, or the refusal."""
    tokens, reasons = {key: [] for key in keys}, {}
    async with asyncio.timeout(10):
        while set(reasons) < set(keys):
            message = await link.receive()
            if isinstance(message, Rejected):
                return message
            if isinstance(message, Report):
                for key, token in zip(message.streams, message.tokens, strict=True):
                    tokens[key].append(token)
                reasons |= {row.stream: row.reason for row in message.finishes}
    return tokens, reasons


def text(tokens):
    return b"".join(TOKENS[token] for token in tokens).decode()


async def run(replica, wanted, stream):
    link = await connect_local(replica.serve, f"router {stream}")
    link.send(submit_message(wanted, stream))
    asked = len(replica.test_grammars.asked)
    await until(lambda: len(replica.test_grammars.asked) > asked)
    replica.test_grammars.answer()
    choices = range(wanted.params.n) if wanted.resume is None else wanted.resume
    return await outcome(link, [stream + choice for choice in choices])


async def test_outputs_match_and_end_and_the_tenant_is_whose_turn_it_is(replica):
    tokens, reasons = await run(replica, structured(n=3), 10)
    assert set(reasons.values()) == {"stop"}
    for choice in tokens.values():
        head, tail = text(choice)[:12], text(choice)[12:]
        assert set(head) <= set("abcdef")
        assert tail[:-1].isdigit()
        assert tail[-1] == "X"
    assert replica.test_grammars.asked[0][:2] == (WANTED, "tenant")


async def test_resumed_from_any_prefix_the_tokens_are_the_same(replica):
    tokens, _ = await run(replica, structured(), 10)
    whole = tokens[10]
    for number, cut in enumerate(range(0, len(whole), 3)):
        resumed, _ = await run(replica, structured(f"s{number}", resume={0: tuple(whole[:cut])}), 10)
        assert resumed[10] == whole[cut:]


async def test_a_log_that_does_not_match_ends_its_request_alone(replica):
    refused = await run(replica, structured(resume={0: (60, 60)}), 10)
    assert isinstance(refused, Rejected)
    assert refused.code == "internal_error"
    assert len(await run(replica, structured("next"), 20)) == 2


async def test_a_fault_after_its_grammar_was_made_ends_its_request_alone(replica, monkeypatch):
    def fail(*_):
        raise KeyError("oops")

    with monkeypatch.context() as broken:
        broken.setattr(replica._engine, "add", fail)
        refused = await run(replica, structured(), 10)
    assert isinstance(refused, Rejected)
    assert refused.code == "internal_error"
    assert replica.num_requests == 0
    assert len(await run(replica, structured("next"), 20)) == 2


async def test_others_run_while_a_grammar_is_compiled(replica):
    link = await connect_local(replica.serve, "router")
    link.send(submit_message(structured(), 10))
    bystander = request("bystander", 5, ignore_eos=True)
    link.send(submit_message(bystander, 20))
    tokens, _ = await outcome(link, [20])
    assert tokens[20] == expected(bystander)
    assert replica.num_requests == 1
    replica.test_grammars.answer()
    _, reasons = await outcome(link, [10])
    assert reasons == {10: "stop"}


async def test_a_refusal_arrives_as_the_requests_own_error(replica):
    link = await connect_local(replica.serve, "router")
    link.send(submit_message(structured(), 10))
    await until(lambda: replica.test_grammars.asked)
    error = InvalidRequestError("json_schema at #/not: cannot", "structured", "not_supported")
    replica.test_grammars.asked[0][2].set_exception(error)
    refused = await outcome(link, [10])
    assert (refused.stream, refused.code, refused.param) == (10, "not_supported", "structured")
    assert "#/not" in refused.message
    assert replica.num_requests == 0


async def test_aborted_while_its_grammar_is_compiled_a_request_never_runs(replica):
    link = await connect_local(replica.serve, "router")
    link.send(submit_message(structured(), 10))
    await until(lambda: replica.test_grammars.asked)
    link.send(Abort(10))
    await until(lambda: replica.num_requests == 0)
    replica.test_grammars.answer()
    bystander = request("bystander", 5, ignore_eos=True)
    link.send(submit_message(bystander, 20))
    tokens, _ = await outcome(link, [20])
    assert tokens[20] == expected(bystander)
    assert replica.stats.num_running == 0


async def test_nothing_is_kept_of_requests_that_were_aborted_while_their_grammar_is_compiled(replica):
    link = await connect_local(replica.serve, "router")
    for number in range(500):
        link.send(submit_message(structured(f"gone {number}"), 10 + number))
        link.send(Abort(10 + number))
    link.send(submit_message(structured("stays"), 1000))
    await until(lambda: len(replica.test_grammars.asked) == 501 and replica.num_requests == 1)
    await asyncio.sleep(0)
    gc.collect()
    waiting = {one.request_id.partition("@")[0] for one in gc.get_objects() if type(one) is Request}
    assert "stays" in waiting
    assert not {name for name in waiting if name.startswith("gone")}
    assert [event.what for event in replica.test_flight.of("gone 499")] == [Wait.GRAMMAR, Wait.ENDED]
    replica.test_grammars.answer()
    assert (await outcome(link, [1000]))[1] == {1000: "stop"}


async def test_a_replica_that_closes_does_not_wait_for_a_grammar(replica):
    link = await connect_local(replica.serve, "router")
    link.send(submit_message(structured(), 10))
    await until(lambda: replica.test_grammars.asked)
    async with asyncio.timeout(5):
        await replica.close()


async def test_without_a_compiler_structured_requests_are_refused():
    config = EngineConfig("fake", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32, block_size=4)
    core = EngineCore(config, FakeExecutor(64, 4, VOCAB), (EOS,), VOCAB, 64)
    replica = ReplicaCore(core, ReplicaFacts("a", "fake", 128, VOCAB, 4, 63, (EOS,)), ReplicaTimes(heartbeat=60.0))
    link = await connect_local(replica.serve, "router")
    link.send(submit_message(structured(), 10))
    refused = await outcome(link, [10])
    assert (refused.code, refused.param) == ("not_supported", "structured")
    await replica.close()
