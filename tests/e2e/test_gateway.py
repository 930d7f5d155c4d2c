"""`squadron serve --ingress gateway`: our own processes hold the clients' connections; kills under load, Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import grpc
import httpx
import pytest

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from tests.chaos.ingress_load import ALL, exchanges, late, outcomes
from tests.chaos.raw_http import last_error, stalled
from tests.e2e.behind_ingress import (
    BEARER,
    GATEWAY,
    KEY,
    ROUTER,
    grpc_address,
    listeners,
    port_of,
    running,
    served_behind,
    stop_under_load,
    tokens_of_call,
    unfinished,
)
from tests.e2e.command import Command, url_of
from tests.e2e.harness import eventually

pytestmark = pytest.mark.timeout(420)  # a server starts, on a machine that others may use as well


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """The demo model behind two gateways and two routers."""
    with served_behind("gateway", 1, tmp_path_factory.mktemp("home")) as command:
        yield command


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
    await stop_under_load(served, signal.SIGTERM)
