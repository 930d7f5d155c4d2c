"""gRPC against a real Ray Serve app: a gateway beside Serve's proxy, two replicas, and kills under streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

import grpc
import httpx
import pytest
import pytest_asyncio

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from tests.chaos.strike import Strike
from tests.e2e.harness import App, gateway_processes, kill, replica_processes, router_processes
from tests.grpc_client import Told, gathered, refusal_of

STREAMS = 16
TOKENS = 100


@pytest_asyncio.fixture
async def stub(demo_app: App) -> AsyncIterator[InferenceStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{demo_app.grpc_port}") as channel:
        yield InferenceStub(channel)


def generate(prompt: str, **sampling: object) -> pb.GenerateRequest:
    given = {"temperature": 0.0, "max_tokens": 40} | sampling
    return pb.GenerateRequest(
        model="demo", prompt=prompt, output=pb.OUTPUT_TEXT_AND_TOKENS, sampling=pb.Sampling(**given)
    )


async def test_it_says_what_http_says(demo_app: App, stub: InferenceStub) -> None:
    prompt = "def main():\n"
    told = await gathered(stub.Generate(generate(prompt, temperature=0.8, seed=5)))
    body = {"model": "demo", "prompt": prompt, "temperature": 0.8, "seed": 5, "max_tokens": 40}
    answer = httpx.post(f"{demo_app.url}/v1/completions", json=body, timeout=60).json()
    assert told.text == answer["choices"][0]["text"]
    assert told.usage.completion_tokens == answer["usage"]["completion_tokens"] == len(told.token_ids[0])

    messages = [pb.Message(role="user", content="What does os.path.join do?")]
    chat = await gathered(
        stub.Chat(pb.ChatRequest(model="demo", messages=messages, sampling=pb.Sampling(temperature=0, max_tokens=40)))
    )
    body = {"model": "demo", "messages": [{"role": "user", "content": messages[0].content}]}
    answer = httpx.post(
        f"{demo_app.url}/v1/chat/completions", json=body | {"temperature": 0, "max_tokens": 40}, timeout=60
    ).json()
    assert chat.text == answer["choices"][0]["message"]["content"]


async def test_vectors_model_health_and_load_are_told(stub: InferenceStub) -> None:
    vectors = await stub.Embed(pb.EmbedRequest(model="demo", texts=pb.Texts(texts=["import os", "import re"])))
    assert len({tuple(one.values) for one in vectors.embeddings}) == 2
    assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).model == "demo"
    assert (await stub.Health(pb.HealthRequest())).ready
    load = await stub.GetLoad(pb.GetLoadRequest())
    assert [one.ready for one in load.replicas] == [True, True]
    assert all(one.kv_blocks_total > 0 for one in load.replicas)


async def test_an_error_of_the_cluster_has_its_status(stub: InferenceStub) -> None:
    refusal = await refusal_of(stub.Generate(generate("x " * 40_000)))
    assert (refusal.status, refusal.param) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")


async def running(stub: InferenceStub) -> int:
    load = await stub.GetLoad(pb.GetLoadRequest())
    return sum(one.running + one.waiting for one in load.replicas) + load.inside


async def used_blocks(stub: InferenceStub) -> int:
    load = await stub.GetLoad(pb.GetLoadRequest())
    return sum(one.kv_blocks_total - one.kv_blocks_free - one.kv_blocks_cached for one in load.replicas)


async def soon(check: Callable[[], Awaitable[int]], what: str, timeout: float = 10) -> None:
    """Wait until `await check()` is zero."""
    try:
        async with asyncio.timeout(timeout):
            while await check():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {timeout} s: {what}") from None


@pytest.mark.parametrize("way", ["cancel", "deadline", "abort", "disconnect"])
async def test_a_stream_that_ends_early_frees_its_blocks(demo_app: App, stub: InferenceStub, way: str) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{demo_app.grpc_port}") as channel:
        mine = InferenceStub(channel)
        request = generate("def main():\n", max_tokens=1500, ignore_eos=True)
        call = mine.Generate(request, timeout=2.0 if way == "deadline" else None)
        named = await call.read()
        assert (await call.read()).deltas
        assert await used_blocks(stub) > 0 or await running(stub) > 0
        if way == "cancel":
            call.cancel()
        elif way == "abort":
            await mine.Abort(pb.AbortRequest(request_id=named.request_id))
            assert (await refusal_of(call)).code == "aborted"
        elif way == "deadline":
            with pytest.raises(grpc.RpcError) as caught:
                await gathered(call)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await soon(lambda: running(stub), "the request is gone")
    await soon(lambda: used_blocks(stub), "its blocks are free")


def streams(stub: InferenceStub, on_response: Callable[[int], None] = lambda _: None) -> asyncio.Future[list[Told]]:
    """Half greedy, half seeded, all at once."""

    def request(index: int) -> pb.GenerateRequest:
        sampling = {"temperature": 0.0} if index % 2 == 0 else {"temperature": 0.8, "seed": index}
        prompt = f"def function_{index}(self, value):\n    " + "x = value + 1\n    " * (index % 4)
        return generate(prompt, max_tokens=TOKENS, ignore_eos=True, **sampling)

    return asyncio.gather(*[gathered(stub.Generate(request(i)), on_response) for i in range(STREAMS)])


async def test_streams_survive_the_kill_of_a_replica_token_exact(demo_app: App, stub: InferenceStub) -> None:
    undisturbed = await streams(stub)
    victim = replica_processes()[0]
    strike = Strike(10 * STREAMS, lambda: kill(victim))
    before = demo_app.metric("squadron_migrations_total")
    disturbed = await streams(stub, strike)
    assert strike.at, "the streams ended before the kill"
    assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]
    assert [one.text for one in disturbed] == [one.text for one in undisturbed]
    assert all(one.reasons == {0: pb.FINISH_REASON_LENGTH} for one in disturbed)
    assert demo_app.metric("squadron_migrations_total") > before, "no stream had to move: the kill missed them"
    await asyncio.to_thread(demo_app.wait_whole)


async def test_streams_outlive_the_only_router_token_exact(demo_app: App, stub: InferenceStub) -> None:
    undisturbed = await streams(stub)
    victim = router_processes()[0]
    strike = Strike(10 * STREAMS, lambda: kill(victim))
    disturbed = await streams(stub, strike)
    assert strike.at, "the streams ended before the kill"
    assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]
    assert [one.text for one in disturbed] == [one.text for one in undisturbed]
    assert all(one.reasons == {0: pb.FINISH_REASON_LENGTH} for one in disturbed)
    await asyncio.to_thread(demo_app.wait_whole)


async def test_a_killed_gateway_is_told_and_never_looks_like_an_end(demo_app: App, stub: InferenceStub) -> None:
    call = stub.Generate(generate("def main():\n", max_tokens=1500, ignore_eos=True))
    assert (await call.read()).request_id
    kill(gateway_processes()[0])
    with pytest.raises(grpc.RpcError) as caught:
        await gathered(call)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    again = None
    while again is None:
        # What is sent into the connection before gRPC has seen its end is lost: clients try such a call again.
        with suppress_unavailable():
            again = await gathered(stub.Generate(generate("import os\n"), wait_for_ready=True, timeout=60))
    assert again.usage is not None


@contextmanager
def suppress_unavailable() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
