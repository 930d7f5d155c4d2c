"""Calls of gRPC whose routers die under them: clients get what they would have got, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import grpc
import pytest

from cluster.errors import ApiError
from cluster.grpc_api.forwarded import ForwardedCalls
from cluster.grpc_api.rpc import exchange
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from tests.cluster.cluster_lab import until
from tests.cluster.ingress.router_lab import RouterLab
from tests.grpc_client import Told, gathered, refusal_of
from tests.openai_app import MODEL

TOKENS = 200
SAMPLING = pb.Sampling(max_tokens=TOKENS, ignore_eos=True, seed=3, n=2, logprobs=1)
BOTH = pb.OUTPUT_TEXT_AND_TOKENS
GENERATE = pb.GenerateRequest(model=MODEL, prompt="once", sampling=SAMPLING, output=BOTH)
CHAT = pb.ChatRequest(model=MODEL, messages=[pb.Message(role="user", content="hi")], sampling=SAMPLING, output=BOTH)


@asynccontextmanager
async def connected(lab: RouterLab) -> AsyncIterator[InferenceStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{lab.grpc_port}") as channel:
        yield InferenceStub(channel)


async def told(stub: InferenceStub, kind: str) -> Told:
    """All that a call says but its id, however the deltas of its choices took turns."""
    found = await gathered(stub.Generate(GENERATE) if kind == "generate" else stub.Chat(CHAT))
    assert found.request_id
    found.request_id = ""
    found.logprobs.sort(key=lambda one: one.SerializeToString())
    return found


@pytest.mark.parametrize("kind", ["generate", "chat"])
async def test_a_stream_is_what_it_would_have_been(tmp_path, kind):
    rng = Random(kind)
    async with RouterLab(tmp_path, pace=0.003, gateway=True) as lab:
        async with connected(lab) as stub:
            undisturbed = await told(stub, kind)
            assert len(undisturbed.token_ids[1]) == TOKENS
            striking = asyncio.create_task(lab.struck(rng))
            found = await asyncio.gather(*(told(stub, kind) for _ in range(8)))
            striking.cancel()
            assert lab.killed > 1
        assert found == [undisturbed] * 8


async def test_a_router_that_cannot_go_on_with_a_call_now_is_not_the_last_one_asked(tmp_path, monkeypatch):
    refusals, call = [], ForwardedCalls._call

    async def refuse_once(self, asked, body, context):
        if context._continues and not refusals:
            refusals.append(asked)
            async with exchange("Generate", context, lambda *_: None):
                raise ApiError("overloaded", "busy", retry_after=1)
        else:
            await call(self, asked, body, context)

    monkeypatch.setattr(ForwardedCalls, "_call", refuse_once)
    async with RouterLab(tmp_path, gateway=True) as lab, connected(lab) as stub:
        undisturbed = await told(stub, "generate")
        last = {router: router.said + 20 for router in lab.routers}
        lab.on_message = lambda one: lab.kill(one) if one.said == last.get(one) and not lab.killed else None
        assert await told(stub, "generate") == undisturbed
        assert (lab.killed, len(refusals)) == (1, 1)


async def test_where_no_router_comes_in_time_the_status_says_so(tmp_path):
    async with RouterLab(tmp_path, routers=1, router_wait=0.3, gateway=True) as lab:
        lab.on_message = lambda router: lab.kill(router, None) if router.said == 20 else None
        async with connected(lab) as stub:
            lost = await refusal_of(stub.Generate(GENERATE))
            assert (lost.status, lost.code, lost.retryable) == (grpc.StatusCode.UNAVAILABLE, "router_lost", True)
            none = await refusal_of(stub.GetModelInfo(pb.GetModelInfoRequest()))
            assert (none.status, none.code, none.retryable) == (grpc.StatusCode.UNAVAILABLE, "no_router", True)
            late = await refusal_of(stub.Generate(GENERATE, metadata=(("x-request-timeout-seconds", "0.1"),)))
            assert (late.status, late.code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")
        await lab.add()


async def test_a_call_is_aborted_whichever_router_has_it(tmp_path):
    async with RouterLab(tmp_path, routers=3, pace=0.01, gateway=True) as lab, connected(lab) as stub:
        calls = [stub.Generate(GENERATE) for _ in range(3)]
        names = [(await call.read()).request_id for call in calls]
        for call, name in zip(calls, names, strict=True):
            await stub.Abort(pb.AbortRequest(request_id=name))
            assert (await refusal_of(call)).code == "aborted"
        assert (await refusal_of(stub.Abort(pb.AbortRequest(request_id=names[0])))).code == "not_found"


async def test_a_router_whose_client_leaves_is_taken_for_silent_by_nobody(tmp_path):
    async with RouterLab(tmp_path, routers=1, pace=0.01, gateway=True) as lab, connected(lab) as stub:
        (router,) = lab.routers
        call = stub.Generate(GENERATE)
        await call.read()
        assert router.known.load == 1
        call.cancel()
        await until(lambda: not router.known.load)
        assert not router.known.silent
