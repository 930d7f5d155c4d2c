"""An answer on plain ASGI: clients that hang up or stop reading end the work for them."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from cluster.http.asgi import Answer, ClientGone, ClientStalled, until_disconnect


async def nothing_received() -> Message:
    """A client that stays connected and says nothing."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_client_that_takes_nothing_is_taken_for_gone_and_the_work_ends() -> None:
    ended = asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    answer = Answer(send)

    async def work() -> None:
        try:
            await answer.events(b"data: 1\n\n")
        finally:
            ended.set()

    with pytest.raises(ClientStalled):
        await until_disconnect(nothing_received, work(), answer, patience=0.02)
    assert ended.is_set()


async def test_a_slow_reader_and_long_thought_are_no_reason_to_leave() -> None:
    sent: list[Message] = []
    thinks = asyncio.get_running_loop().time() + 0.6

    async def send(message: Message) -> None:
        await asyncio.sleep(0.03)
        sent.append(message)

    answer = Answer(send)

    async def work() -> None:
        for _ in range(10):
            await answer.events(b"data: 1\n\n")
        while asyncio.get_running_loop().time() < thinks:
            await asyncio.sleep(0.01)
        await answer.end(b"data: [DONE]\n\n")

    await until_disconnect(nothing_received, work(), answer, patience=0.25)
    assert len(sent) == 12


async def test_a_client_that_hangs_up_ends_the_work() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await asyncio.Event().wait()

    answer = Answer(send)
    with pytest.raises(ClientGone, match="hung up"):
        await until_disconnect(receive, answer.events(b"data: 1\n\n"), answer)
