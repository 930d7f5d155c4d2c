"""32 requests in every phase of their lives, a fault in the middle of them, and what each client has in the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable

from tests.chaos.raw_http import Exchange, post

TOKENS = 150
DEADLINE = 10.0  # seconds from the fault to the error
PROMPT = "def f(x):"
COMPLETION = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
RESPONSE = {"model": "demo", "input": PROMPT, "max_output_tokens": TOKENS, "ignore_eos": True}
# Streams that run when the fault comes, answers that are being made, and streams that are only just asked for.
RUNNING = [
    *[("/v1/completions", COMPLETION | {"stream": True})] * 14,
    *[("/v1/responses", RESPONSE | {"stream": True})] * 6,
]
UNARY = [("/v1/completions", COMPLETION)] * 6
ASKED = [("/v1/completions", COMPLETION | {"stream": True})] * 6

ALL = RUNNING + UNARY + ASKED


async def exchanges(
    port: int, strike: Callable[[], None], key: str | None = None, tokens: int = TOKENS
) -> tuple[list[Exchange], float]:
    """Run all requests, `strike()` in the middle of them; return what came of them and when it struck."""
    of_size = {"max_tokens": tokens, "max_output_tokens": tokens}
    running = asyncio.Semaphore(0)

    def sized(asked: dict) -> dict:
        return asked | {name: size for name, size in of_size.items() if name in asked}

    async def begun(path: str, asked: dict) -> Exchange:
        events = 0

        def on_data() -> None:
            nonlocal events
            events += 1
            if events == 3:  # the head and a few frames
                running.release()

        got = await post(port, path, sized(asked), on_data, key)
        if events < 3:  # ended before the fault: its outcome says how
            running.release()
        return got

    tasks = [asyncio.create_task(begun(path, asked)) for path, asked in RUNNING]
    tasks += [asyncio.create_task(post(port, path, sized(asked), key=key)) for path, asked in UNARY]
    async with asyncio.timeout(30):
        for _ in RUNNING:
            await running.acquire()
    tasks += [asyncio.create_task(post(port, path, sized(asked), key=key)) for path, asked in ASKED]
    await asyncio.sleep(0.02)  # those are on their way, somewhere
    strike()
    struck = time.monotonic()
    return await asyncio.gather(*tasks), struck


def outcome(path: str, asked: dict, got: Exchange) -> str:
    """What this is for a client: `whole`, an error's code, `cut` or `hung`; anything else must never be."""
    if got.ended is None:
        return "hung"
    if not got.framed:
        return "cut"
    if got.error is not None:
        return str(got.error["code"])
    if got.status != 200:
        return f"untyped {got.status}: {got.body[-300:]!r}"
    return "whole" if tokens_of(path, asked, got.body) == TOKENS else f"SILENTLY SHORT: {got.body[-300:]!r}"


def tokens_of(path: str, asked: dict, body: bytes) -> int:
    """Tokens of an answer that says that it is complete; -1 where it does not."""
    if not asked.get("stream"):
        return len(json.loads(body)["choices"][0]["token_ids"])
    if path == "/v1/responses":
        last = json.loads(body.rstrip().rpartition(b"\ndata: ")[2])
        return last["response"]["usage"]["output_tokens"] if last["type"] == "response.incomplete" else -1
    shown = [frame for frame in body.split(b"\n\n")[:-1] if not frame.startswith(b":")]  # that is a comment
    *frames, done = [frame.removeprefix(b"data: ") for frame in shown]
    choices = [json.loads(frame)["choices"][0] for frame in frames]
    if done != b"[DONE]" or choices[-1]["finish_reason"] != "length":
        return -1
    return sum(len(choice.get("token_ids", ())) for choice in choices)


def outcomes(got: list[Exchange]) -> Counter[str]:
    """Count what came of the requests of `exchanges`."""
    return Counter(outcome(path, asked, one) for (path, asked), one in zip(ALL, got, strict=True))


def late(got: list[Exchange], struck: float) -> list[float]:
    """Seconds from the fault to the errors that took longer than the promise."""
    failed = [one for one in got if not one.framed or one.error is not None]
    return [one.ended - struck for one in failed if one.ended is not None and one.ended - struck > DEADLINE]
