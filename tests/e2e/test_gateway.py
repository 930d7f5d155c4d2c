"""`squadron serve --ingress gateway`: our own processes hold the clients' connections; kills under load, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress

import grpc
import httpx
import psutil
import pytest

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from tests.chaos.ingress_load import ALL, exchanges, late, outcomes
from tests.chaos.raw_http import last_error, stalled
from tests.e2e.command import Command, url_of, wait_gone
from tests.e2e.harness import answers, eventually

KEY = "sk-ingress"
BEARER = {"Authorization": f"Bearer {KEY}"}
LONG = 1900  # tokens, of 32 requests at once
ROUTER, GATEWAY = "ServeReplica:squadron:Router", "ServeReplica:squadron:Gateway"

pytestmark = pytest.mark.timeout(420)  # a server starts, on a machine that others may use as well


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """The demo model over HTTP and gRPC behind two gateways and two routers, on a replica of one rank."""
    command = Command(
        *("serve", "demo", "--ingress", "gateway", "--port", "0", "--grpc-port", "0", "--api-key", KEY),
        *("--routers", "2", "--cpus-per-worker", "0.5", "--device", "cpu", "--drain-timeout", "10"),
        home=tmp_path_factory.mktemp("home"),
    )
    try:
        command.wait_for("Ctrl-C stops it")
        yield command
    finally:
        command.kill()


def port_of(command: Command) -> int:
    return int(url_of(command).rpartition(":")[2])


def running(command: Command, title: str) -> list[psutil.Process]:
    """Its processes with `title` in their command lines, oldest first."""
    found = [one for one, words in answers(command.descendants(), psutil.Process.cmdline) if title in " ".join(words)]
    return sorted(found, key=lambda one: (one.create_time(), one.pid))


def listeners(process: psutil.Process) -> list[str]:
    """Addresses on which it listens; none of one that ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        if "ServeReplica" not in " ".join(process.cmdline()):
            return [f"{one.laddr.ip.removeprefix('::ffff:')}:{one.laddr.port}" for one in listening]
    return []


def unfinished(command: Command) -> float:
    """Sequences that the replicas run, as whichever router answers sees them."""
    lines = httpx.get(f"{url_of(command)}/metrics", headers=BEARER, timeout=10).text.splitlines()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("squadron_num_requests_running{")]
    assert found
    return sum(found)


async def tokens_of_call(command: Command, seed: int, most: int = 300) -> list[int]:
    """The tokens of a call of gRPC that takes a while."""
    sampling = pb.Sampling(seed=seed, temperature=1.0, max_tokens=most, ignore_eos=True)
    asked = pb.GenerateRequest(model="demo", prompt="x", sampling=sampling, output=pb.OUTPUT_TOKENS)
    async with grpc.aio.insecure_channel(grpc_address(command)) as channel:
        call = InferenceStub(channel).Generate(asked, timeout=120, metadata=(("authorization", f"Bearer {KEY}"),))
        return [token async for response in call for delta in response.deltas for token in delta.token_ids]


def grpc_address(command: Command) -> str:
    return re.search(r"^gRPC: (127\.0\.0\.1:\d+)", command.text, re.MULTILINE)[1]


def whole_again(command: Command) -> None:
    """Wait for two gateways and two routers that answer."""

    def whole() -> bool:
        alive = len(running(command, ROUTER)) == len(running(command, GATEWAY)) == 2
        return alive and httpx.get(f"{url_of(command)}/ready", headers=BEARER, timeout=10).json()["ready"]

    eventually(whole, "both gateways and both routers are there", 60)


def test_it_listens_on_loopback_alone_and_answers_as_behind_serves_proxy(served: Command) -> None:
    url = url_of(served)
    addresses = [address for process in served.descendants() for address in listeners(process)]
    assert addresses
    assert all(address.startswith("127.") for address in addresses), addresses
    assert "Warning" not in served.text
    assert httpx.get(f"{url}/-/healthz", timeout=10).text == "success"
    assert httpx.get(f"{url}/-/routes", timeout=10).status_code == 404
    assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 401
    answer = httpx.get(f"{url}/v1/models", headers=BEARER | {"x-request-id": "mine"}, timeout=10)
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (200, ["mine"])
    assert len(httpx.get(f"{url}/health", timeout=10).headers.get_list("x-request-id")) == 1
    assert httpx.get(f"{url}/ready", headers=BEARER, timeout=10).json()["guarded"] is True
    with grpc.insecure_channel(grpc_address(served)) as channel:
        told = InferenceStub(channel).GetModelInfo(
            pb.GetModelInfoRequest(), timeout=10, metadata=(("authorization", f"Bearer {KEY}"),)
        )
    assert told.model == "demo"


async def test_a_reader_that_stops_is_told(served: Command) -> None:
    asked = {"model": "demo", "prompt": "x", "ignore_eos": True, "max_tokens": 1900, "logprobs": 20, "n": 16}
    reader, writer = await stalled(port_of(served), asked, key=KEY)  # 50 MB of them
    try:
        beside, _ = await exchanges(port_of(served), lambda: None, KEY)
        assert outcomes(beside) == {"whole": len(ALL)}
        await asyncio.to_thread(eventually, lambda: not unfinished(served), "it is not generated for", 120)
        error = await last_error(reader, writer)
        assert (error["code"], error["retryable"]) == ("slow_consumer", False)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_every_answer_survives_a_router(served: Command, sign: signal.Signals) -> None:
    victim = running(served, ROUTER)[0]
    undisturbed = await asyncio.gather(*(tokens_of_call(served, seed) for seed in range(8)))
    calls = [asyncio.create_task(tokens_of_call(served, seed)) for seed in range(8)]
    got, _ = await exchanges(port_of(served), lambda: os.kill(victim.pid, sign), KEY)
    assert outcomes(got) == {"whole": len(ALL)}
    assert await asyncio.gather(*calls) == undisturbed
    await asyncio.to_thread(eventually, lambda: not victim.is_running(), "Serve has noticed", 60)
    whole_again(served)


async def test_no_answer_is_silently_short_when_a_gateway_dies(served: Command) -> None:
    got, struck = await exchanges(port_of(served), running(served, GATEWAY)[0].kill, KEY)
    counts = outcomes(got)
    assert set(counts) <= {"whole", "cut"}, counts
    assert counts["cut"], "the dead gateway's streams must be cut"
    assert not late(got, struck)
    whole_again(served)


async def test_sigterm_tells_whom_it_cuts_and_leaves_nothing_behind(served: Command) -> None:
    """The last test of this file: it ends what the others use."""
    started = served.descendants()
    call = asyncio.create_task(tokens_of_call(served, 0, LONG))
    got, _ = await exchanges(port_of(served), lambda: os.kill(served.process.pid, signal.SIGTERM), KEY, LONG)
    assert outcomes(got) == {"shutting_down": len(ALL)}
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        await call
    assert await asyncio.to_thread(served.wait) == 0
    assert "Traceback" not in served.text
    wait_gone(started)
