"""Clients of the chaos tests: streams read byte by byte, with what came of each told in one word.

A client that takes the end of a body for the end of an answer would be fooled by a stream that is silently short, so
every rule of a good ending is checked here: one terminal per request, nothing after it, usage = tokens emitted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

WHOLE, ERROR, SHORT, HANG, BROKEN = "whole", "error", "short", "hang", "broken"
Heard = Callable[["Stream"], None]


@dataclass(slots=True)
class Stream:
    """One streamed completion as its client saw it.

    kind: `whole` (finish reason, usage and [DONE]), `error` (one typed error), `short` (a 200 that just ends),
    `broken` (the connection was cut: any client notices), `hang` (nothing for all the time that the client waits).
    faults: rules that were broken, in words; must be empty whatever happened. times: when each chunk came, monotonic.
    """

    asked: dict[str, Any]
    kind: str = SHORT
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    status: int = 0
    retry_after: str | None = None
    usage: dict[str, int] | None = None
    times: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def said(self) -> tuple[tuple[int, ...], str, str | None]:
        """What must be the same in an undisturbed run."""
        return tuple(self.tokens), self.text, self.finish_reason

    def longest_wait(self, since: float, window: float = 1.0) -> float | None:
        """Return the longest wait between two chunks that was under way at `since` or began within `window` seconds.

        What lay in buffers at `since` still arrives, so the next chunk says little. None if it was not under way.
        """
        if not self.times or not self.times[0] <= since <= self.times[-1]:
            return None
        gaps = [(max(a, since), b) for a, b in pairwise(self.times) if b > since and a <= since + window]
        return max(b - a for a, b in gaps)


def greedy_or_seeded(index: int, tokens: int = 120, model: str = "demo") -> dict[str, Any]:
    """Return request `index` of a set: half greedy, half seeded, prompts of different lengths."""
    sampling = {"temperature": 0} if index % 2 == 0 else {"temperature": 0.8, "seed": index}
    prompt = f"def function_{index}(self, value):\n    " + "x = value + 1\n    " * (index % 4)
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **sampling}


async def read_stream(
    client: httpx.AsyncClient, asked: dict[str, Any], on_chunk: Heard = lambda _: None, patience: float = 60.0
) -> Stream:
    """Ask for one streamed completion and read it to whatever end it has.

    patience: seconds without a byte after which the stream hangs.
    """
    stream = Stream(asked)
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    timeout = httpx.Timeout(patience, connect=10.0)
    try:
        async with client.stream("POST", "/v1/completions", json=asked | options, timeout=timeout) as response:
            stream.status = response.status_code
            stream.retry_after = response.headers.get("retry-after")
            if response.status_code != 200:
                _refused(stream, await response.aread())
            else:
                await _read_events(stream, response, on_chunk)
    except httpx.ReadTimeout:
        stream.kind = HANG
    except httpx.TransportError as error:
        stream.kind = BROKEN
        stream.error = {"code": type(error).__name__, "message": str(error)}
    return stream


async def read_all(
    client: httpx.AsyncClient,
    asked: Sequence[dict[str, Any]],
    on_chunk: Heard = lambda _: None,
    patience: float = 60.0,
) -> list[Stream]:
    """Read all streams at once."""
    return list(await asyncio.gather(*(read_stream(client, one, on_chunk, patience) for one in asked)))


def longest_wait(streams: Sequence[Stream], since: float, window: float = 60.0) -> float:
    """Return the longest wait of any of the streams, as `Stream.longest_wait`."""
    waits = [stream.longest_wait(since, window) for stream in streams]
    return max(wait for wait in waits if wait is not None)


def client_of(url: str) -> httpx.AsyncClient:
    """Return a client without limits of its own."""
    return httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None), trust_env=False)


def kinds(streams: Sequence[Stream]) -> Counter[str]:
    """Count the streams by kind."""
    return Counter(stream.kind for stream in streams)


def check_promise(streams: Sequence[Stream], oracle: Sequence[Stream]) -> None:
    """Assert what every accepted request is promised: its whole, token-exact answer, or one typed error."""
    for stream, undisturbed in zip(streams, oracle, strict=True):
        assert stream.kind in (WHOLE, ERROR), f"{stream.kind} after {len(stream.tokens)} tokens: {stream.error}"
        assert not stream.faults, stream.faults
        tokens = stream.tokens
        assert tokens == undisturbed.tokens[: len(tokens)], "tokens differ from the undisturbed run"
        if stream.kind == WHOLE:
            assert stream.said == undisturbed.said


def check_exact(streams: Sequence[Stream], oracle: Sequence[Stream]) -> None:
    """Assert that every stream is whole and as in the undisturbed run."""
    check_promise(streams, oracle)
    errors = [stream.error for stream in streams if stream.kind != WHOLE]
    assert not errors, errors


def _refused(stream: Stream, body: bytes) -> None:
    stream.kind = ERROR
    try:
        stream.error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        stream.faults.append(f"status {stream.status} without a typed error: {body[:200]!r}")
    else:
        _check_error(stream)


async def _read_events(stream: Stream, response: httpx.Response, on_chunk: Heard) -> None:
    done = False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if done or stream.error is not None:
            stream.faults.append(f"an event after the end: {line[:200]}")
        elif line == "data: [DONE]":
            done = True
        else:
            _take(stream, json.loads(line[6:]))
            on_chunk(stream)
    if stream.error is not None:
        stream.kind = ERROR
        _check_error(stream)
    elif done:
        stream.kind = WHOLE
        _check_whole(stream)


def _take(stream: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        stream.error = event["error"]
        return
    if event.get("usage"):
        stream.usage = event["usage"]
    for choice in event["choices"]:
        if stream.finish_reason is not None:
            stream.faults.append("a choice after its end")
        stream.times.append(time.monotonic())
        stream.tokens += choice.get("token_ids") or []
        stream.text += choice["text"]
        stream.finish_reason = choice["finish_reason"]


def _check_whole(stream: Stream) -> None:
    if stream.finish_reason is None:
        stream.faults.append("[DONE] without a finish reason")
    if stream.usage is None or stream.usage["completion_tokens"] != len(stream.tokens):
        stream.faults.append(f"usage {stream.usage} for {len(stream.tokens)} tokens")


def _check_error(stream: Stream) -> None:
    missing = {"code", "message", "type", "param", "retryable", "request_id"} - set(stream.error or ())
    if missing:
        stream.faults.append(f"an error without {sorted(missing)}: {stream.error}")
