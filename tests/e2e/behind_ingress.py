"""What the tests of `squadron serve --ingress ...` share: the server with its key, its processes, a call of gRPC."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from tests.chaos.ingress_load import ALL, exchanges, outcomes
from tests.e2e.command import Command, url_of, wait_gone
from tests.e2e.harness import answers

KEY = "sk-ingress"
BEARER = {"Authorization": f"Bearer {KEY}"}
LONG = 1900  # tokens, of 32 requests at once
ROUTER, GATEWAY = "ServeReplica:squadron:Router", "ServeReplica:squadron:Gateway"


@contextmanager
def served_behind(ingress: str, replicas: int, home: Path) -> Iterator[Command]:
    """Serve the demo model over HTTP and gRPC behind two routers, replicas of one rank each."""
    command = Command(
        *("serve", "demo", "--ingress", ingress, "--port", "0", "--grpc-port", "0", "--api-key", KEY),
        *("--replicas", str(replicas), "--routers", "2", "--cpus-per-worker", "0.5", "--device", "cpu"),
        *("--drain-timeout", "10"),
        home=home,
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


async def stop_under_load(command: Command, number: signal.Signals) -> None:
    """Stop it while more runs than the grace is enough for: all ends with the error, and nothing is left."""
    started = command.descendants()
    call = asyncio.create_task(tokens_of_call(command, 0, LONG))
    send = os.killpg if number == signal.SIGINT else os.kill
    got, _ = await exchanges(port_of(command), lambda: send(command.process.pid, number), KEY, LONG)
    assert outcomes(got) == {"shutting_down": len(ALL)}
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        await call
    assert await asyncio.to_thread(command.wait) == 0
    assert "Traceback" not in command.text
    wait_gone(started)
