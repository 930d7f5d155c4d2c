"""Clients that mean harm, against the real HAProxy with the configuration that it is given."""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.serve import haproxy
from deploy.serve.haproxy import CLIENT_TIMEOUT, HAProxySetup
from deploy.serve.haproxy_launcher import HEADERS_TIMEOUT, rewritten

SLOW = 0.8  # seconds in which the router below says nothing; longer than the clients' timeouts here
REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def configuration(folder: Path, port: int, router: int) -> str:
    """What the installed Ray Serve writes, as ours."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig

    told = HAProxySetup(folder, 1, 2).variables(1.0)
    cfg = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        metrics_socket_path=str(folder / "log.sock"),
        metrics_port=free_port(),
        stats_port=free_port(),
        # Read from the environment when Serve is imported.
        timeout_client_s=int(told["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"]),
        is_head=True,
    )
    cfg.http_options.host, cfg.http_options.port = "127.0.0.1", port
    backend = BackendConfig("http-squadron", "/", servers=[ServerConfig("router", "127.0.0.1", router)])
    api = HAProxyApi(cfg, {"http-squadron": backend}, str(folder / "haproxy.cfg"))
    api._generate_config_file_internal()
    return rewritten((folder / "haproxy.cfg").read_text())


def sooner(text: str) -> str:
    """The same, with a test's patience."""
    for name, seconds in (("http-request", HEADERS_TIMEOUT), ("client", CLIENT_TIMEOUT)):
        text, count = re.subn(rf"^(\s+timeout {name}) {seconds}s$", r"\1 300ms", text, flags=re.MULTILINE)
        assert count == 1, f"timeout {name}"
    return text


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A router that takes its time."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            await reader.readexactly(1000)
        if b"/-/" not in head:
            await asyncio.sleep(SLOW)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()


@asynccontextmanager
async def running():
    """HAProxy in front of one router; yields its port."""
    with tempfile.TemporaryDirectory(prefix="sqd-", dir="/tmp") as name:
        port = free_port()
        router = await asyncio.start_server(answer, "127.0.0.1", 0)
        path = Path(name) / "ours.cfg"
        path.write_text(sooner(configuration(Path(name), port, router.sockets[0].getsockname()[1])))
        process = await asyncio.create_subprocess_exec(
            haproxy._binary(), "-db", "-f", str(path), stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(10):
                while not await listens(port):
                    await asyncio.sleep(0.02)
            yield port
        finally:
            process.kill()
            await process.wait()
            router.close()


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True


async def told(port: int, said: bytes) -> bytes:
    """All that comes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


async def trickled(port: int) -> bytes:
    """Headers that come byte by byte, without end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    end = asyncio.ensure_future(reader.read())
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    async with asyncio.timeout(5):
        while not end.done():
            writer.write(b"a")
            await asyncio.wait([end], timeout=0.05)
    writer.close()
    return end.result()


async def test_haproxy_waits_for_no_client_that_is_slow_and_for_routers_that_are():
    async with running() as port:
        found = await asyncio.gather(
            told(port, b""),
            told(port, b"GET / HTTP/1.1\r\nHost: x\r\n"),
            trickled(port),
            told(port, REQUEST + b"a" * 10),  # and no more of its body
            told(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
            told(port, b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n"),
            told(port, b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Many: a\r\n" * 200 + b"\r\n"),
            told(port, REQUEST.replace(b"Host", b"Connection: close\r\nHost") + b"a" * 1000),
        )
    first = [one.partition(b"\r\n")[0] for one in found]
    assert first[:4] == [b"HTTP/1.1 408 Request Time-out"] * 3 + [b"HTTP/1.1 400 Bad request"]
    # One that waits for its answer is no slow client.
    assert first[4] == b"HTTP/1.1 200 OK" and found[4].endswith(b"hi")
    assert first[5:7] == [b"HTTP/1.1 400 Bad request"] * 2
    assert first[7] == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("name", ["timeout http-request 20s", "timeout client 300s", "maxconn 4096"])
def test_what_bounds_clients_is_in_the_configuration(tmp_path, name):
    lines = [line.strip() for line in configuration(tmp_path, 1, 2).splitlines()]
    assert lines.count(name) == 1
