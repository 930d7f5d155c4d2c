"""`squadron serve --ingress haproxy`: what it listens on, what passes through it, kills under load, Ctrl-C."""

from __future__ import annotations

import asyncio
import csv
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
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
    """The demo model behind two gateways and two routers, two replicas of one rank each."""
    with served_behind("haproxy", 2, tmp_path_factory.mktemp("home")) as command:
        yield command


def statistics(command: Command) -> re.Match[str]:
    """Addresses of HAProxy's statistics and of its metrics, as told at the start."""
    told = r"^HAProxy's statistics at (\S+), its metrics at (\S+), without a key$"
    return re.search(told, command.text, re.MULTILINE)


def gateways(command: Command) -> set[str]:
    """Names of the gateways to which HAProxy sends requests."""
    rows = csv.DictReader(httpx.get(f"{statistics(command)[1]};csv", timeout=10).text.splitlines())
    return {row["svname"] for row in rows if "-Gateway-" in row["svname"] and row["status"] == "UP"}


def alone(command: Command) -> list[psutil.Process]:
    """The process of HAProxy, none while there are two."""
    found = running(command, "haproxy -db")
    return found if len(found) == 1 else []


def whole_again(command: Command, before: set[str] = frozenset(), lost: int = 0) -> None:
    """Wait for both replicas, and for both gateways at HAProxy: `before` but for as many others as were `lost`."""

    def whole() -> bool:
        body = httpx.get(f"{url_of(command)}/ready", headers=BEARER, timeout=10).json()
        now = gateways(command)
        known = not before or len(before & now) == 2 - lost
        return body.get("ready") and len(body["replicas"]) == 2 and len(now) == 2 and known

    eventually(whole, "both replicas and both gateways are ready", 60)


def test_it_says_what_listens_and_only_loopback_does(served: Command) -> None:
    """But for the one port of each replica that Serve guards with Ray's token, as without HAProxy."""
    told = statistics(served)
    assert "Statistics Report for HAProxy" in httpx.get(told[1], timeout=10).text
    assert "haproxy_process_" in httpx.get(told[2], timeout=10).text
    assert "Warning" not in served.text
    addresses = [address for process in served.descendants() for address in listeners(process)]
    assert len(addresses) > 3
    assert all(address.startswith("127.") for address in addresses), addresses
    assert not httpx.get(f"{url_of(served)}/health", timeout=10).is_error


def test_keys_ids_page_and_grpc_are_as_behind_serves_proxy(served: Command) -> None:
    url = url_of(served)
    assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 401
    answer = httpx.get(f"{url}/v1/models", headers=BEARER | {"x-request-id": "mine"}, timeout=10)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert len(httpx.get(f"{url}/health", timeout=10).headers.get_list("x-request-id")) == 1
    assert "<title>Squadron</title>" in httpx.get(f"{url}/ui", auth=("any", KEY), timeout=10).text
    assert httpx.get(f"{url}/ready", headers=BEARER, timeout=10).json()["guarded"] is True
    with grpc.insecure_channel(grpc_address(served)) as channel:
        metadata = (("authorization", f"Bearer {KEY}"),)
        assert InferenceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=10, metadata=metadata).model


async def test_every_answer_survives_a_replica(served: Command) -> None:
    victim = running(served, "ServeReplica:squadron:Replica")[0]
    got, _ = await exchanges(port_of(served), victim.kill, KEY)
    assert outcomes(got) == {"whole": len(ALL)}
    whole_again(served)


async def test_a_reader_that_stops_is_told_and_no_router_holds_its_answer(served: Command) -> None:
    """HAProxy holds little; the router's own server takes all that it is given, unless somebody waits for it."""
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
    """Those of gRPC too: the gateway asks the other router for the rest."""
    victim, before = running(served, ROUTER)[0], gateways(served)
    calls = [asyncio.create_task(tokens_of_call(served, seed)) for seed in range(8)]
    undisturbed = await asyncio.gather(*calls)
    calls = [asyncio.create_task(tokens_of_call(served, seed)) for seed in range(8)]
    got, _ = await exchanges(port_of(served), lambda: os.kill(victim.pid, sign), KEY)
    assert outcomes(got) == {"whole": len(ALL)}
    assert await asyncio.gather(*calls) == undisturbed
    await asyncio.to_thread(eventually, lambda: not victim.is_running(), "Serve has noticed", 60)
    whole_again(served, before)
    await asyncio.to_thread(eventually, lambda: len(running(served, ROUTER)) == 2, "another router is there", 60)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_no_answer_is_silently_short_when_a_gateway_dies(served: Command, sign: signal.Signals) -> None:
    victim, before = running(served, GATEWAY)[0], gateways(served)
    got, struck = await exchanges(port_of(served), lambda: os.kill(victim.pid, sign), KEY)
    counts = outcomes(got)
    assert set(counts) <= {"whole", "cut", "router_lost", "no_router"}, counts
    assert counts["cut"], "the dead gateway's streams must be cut"
    assert not late(got, struck)
    whole_again(served, before, lost=1)


async def test_a_killed_haproxy_cuts_and_comes_back(served: Command) -> None:
    # While one takes over from another, as after the death of a gateway, the old one has the streams.
    (proxy,) = await asyncio.to_thread(eventually, lambda: alone(served), "one HAProxy runs", 60)
    got, struck = await exchanges(port_of(served), proxy.kill, KEY)
    counts = outcomes(got)
    assert set(counts) <= {"whole", "cut"}, counts
    assert counts["cut"]
    assert not late(got, struck)
    whole_again(served)


async def test_ctrl_c_tells_whom_it_cuts_and_leaves_no_haproxy_and_no_folder_behind(served: Command) -> None:
    """The last test of this file: it ends what the others use."""
    (proxy,) = eventually(lambda: alone(served), "one HAProxy runs", 60)
    folder = Path(proxy.cmdline()[proxy.cmdline().index("-f") + 1]).parents[1]
    assert folder.stat().st_mode & 0o777 == 0o700
    await stop_under_load(served, signal.SIGINT)
    assert not folder.exists()
