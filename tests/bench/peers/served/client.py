"""The one client of all servers: streams of `/v1/completions` on raw sockets, read first, understood afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

PROMPT_TOKENS = OUTPUT_TOKENS = 128
TIMEOUT = 600.0  # seconds for all streams that are asked for at once
EVENT, DONE = b"data: {", b"data: [DONE]"
VOCAB = range(300, 3300)  # of the demo model, without special tokens


class AskError(Exception):
    """A server did not answer what it was asked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole stream. first_s: seconds to its first token. tokens: as the server counts them."""

    first_s: float
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Streams that were asked for at once. seconds: until the last has ended. cpu_s: of this process."""

    answers: Sequence[Answer]
    seconds: float
    cpu_s: float


def prompt(number: int) -> list[int]:
    """Return a prompt of random ids that no other number begins with."""
    return random.Random(number).choices(VOCAB, k=PROMPT_TOKENS)


async def ask(port: int, numbers: Sequence[int], tokens: int = OUTPUT_TOKENS) -> Asked:
    """Read the streams of some prompts at once. Raises `AskError` where one is not whole."""
    requests = [_request(number, tokens) for number in numbers]
    began, used = time.perf_counter(), time.process_time()
    try:
        async with asyncio.timeout(TIMEOUT):
            read = await asyncio.gather(*[_read(port, request) for request in requests])
    except TimeoutError:
        raise AskError(f"{len(numbers)} streams had not ended after {TIMEOUT:g} s") from None
    except OSError as error:
        raise AskError(f"the connection failed: {error}") from None
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    return Asked([understood(data, first, tokens) for data, first in read], seconds, cpu)


def understood(data: bytes, first_s: float, tokens: int) -> Answer:
    """Return what a response says. Raises `AskError` where it is an error, or has another number of `tokens`."""
    head, _, body = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body = _joined(body)
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise AskError(f"{head.splitlines()[:1]}: {body[:500]!r}")
    if DONE not in body:
        raise AskError(f"a stream ended early: {body[-200:]!r}")
    events = [json.loads(line[len(EVENT) - 1 :]) for line in body.split(b"\n") if line.startswith(EVENT)]
    if errors := [event["error"] for event in events if "error" in event]:
        raise AskError(f"a stream ended with {errors[0]}")
    counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    if counts[-1:] != [tokens]:
        raise AskError(f"a stream has {counts[-1:] or 'no count of its'} tokens, wanted were {tokens}")
    return Answer(first_s, tokens, "".join(event["choices"][0]["text"] for event in events if event["choices"]))


def _request(number: int, tokens: int) -> bytes:
    asked = {"model": "demo", "prompt": prompt(number), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n"  # so that a response which is no stream has an end, too
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _read(port: int, request: bytes) -> tuple[bytes, float]:
    """Return a response as it came, and the seconds until its first event was there."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        parts: list[bytes] = []
        first, tail = None, b""
        while DONE not in tail and (more := await reader.read(65536)):
            parts.append(more)
            tail = tail[-len(DONE) :] + more
            if first is None and EVENT in tail:
                first = time.perf_counter() - began
    finally:
        writer.close()
    return b"".join(parts), first if first is not None else time.perf_counter() - began


def _joined(body: bytes) -> bytes:
    """Return the data of chunks; the last may not be there."""
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        parts.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(parts)
