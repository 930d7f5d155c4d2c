"""`squadron demo-failover` counts honestly: what differs, breaks off or is refused is never called exact."""

from __future__ import annotations

import asyncio
import io
import json
import time
from random import Random

import httpx
import pytest
from rich.console import Console

from deploy.failover.board import Board, Kill, ReplicaSeen, StreamState, line, screen
from deploy.failover.command import FailoverOptions, Show
from deploy.failover.killer import Killer
from deploy.failover.streams import Question, ask_again_and_again, record

TOKENS = [5, 6, 7]


def chunk(tokens: list[int], finish: str | None = None) -> dict:
    return {"choices": [{"text": "x" * len(tokens), "token_ids": tokens, "finish_reason": finish}]}


def body(*events: dict, done: bool = True) -> str:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines) + ("data: [DONE]\n\n" if done else "")


GOOD = body(chunk([5, 6]), chunk([7], "length"))
ANSWERS = {
    "exact": (200, GOOD, 1),
    "another token": (200, body(chunk([5, 9]), chunk([7], "length")), 0),
    "a token twice": (200, body(chunk([5, 6]), chunk([6, 7], "length")), 0),
    "silently short": (200, body(chunk([5, 6]), done=False), 0),
    "short with [DONE]": (200, body(chunk([5, 6])), 0),
    "a typed error": (200, body(chunk([5]), {"error": {"message": "the replica was lost"}}, done=False), 0),
    "refused": (503, json.dumps({"error": {"message": "no replica"}}), 0),
}


def client(status: int, text: str) -> httpx.AsyncClient:
    async def answer(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)  # as any network would, let others have their turn
        return httpx.Response(status, text=text)

    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize("case", ANSWERS)
async def test_only_the_undisturbed_answer_counts_as_exact(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.failover.streams.PAUSE", 0)
    status, text, exact = ANSWERS[case]
    state, stopping = StreamState(0, reference=TOKENS), asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stopping.set)
    async with client(status, text) as http:
        await ask_again_and_again(http, Question("demo", 0, 3), state, stopping)
    assert (state.exact > 0, state.failed > 0) == (bool(exact), not exact)
    assert bool(state.error) == (not exact)


async def test_the_recorded_answer_is_its_token_ids() -> None:
    async with client(200, GOOD) as http:
        assert await record(http, Question("demo", 1, 3)) == TOKENS


def board(*kills: Kill, exact: int = 3, failed: int = 0, wanted: int | None = None) -> Board:
    return Board([StreamState(0, exact=exact, failed=failed)], wanted, kills=list(kills))


def test_it_is_proven_only_by_kills_that_no_answer_noticed() -> None:
    kill = Kill(1, "a", 0.0, 5.0)
    assert board(kill).proven
    assert board(kill, kill, wanted=2).proven
    assert not board().proven
    assert not board(kill, wanted=2).proven
    assert not board(kill, exact=0).proven
    assert not board(kill, failed=1).proven


def test_the_summary_is_one_line_of_counts() -> None:
    said = board(Kill(1, "a", 0.0, 5.0), Kill(2, "b", 9.0, 6.5), exact=41, failed=1).summary()
    assert said.startswith("2 kills: 41 answers exact, 1 not; 0 moved")
    assert said.endswith("whole again after 6.5 s at most.")


def test_the_screen_shows_streams_replicas_and_kills_in_eighty_columns() -> None:
    stream = StreamState(0, reference=TOKENS, exact=4)
    stream.begin()
    stream.news([5, 6], "a\nb", 10.0)
    other = StreamState(1, reference=TOKENS, failed=1, error="differs from token 2 on")
    other.begin()
    other.news([9], "zz", 10.0)
    shown = Board([stream, other], 3, kills=[Kill(77, "cccc", 9.0)], migrations=6)
    shown.replicas = [
        ReplicaSeen("aaaa", "ready", (41, 42), 8, 0.25),
        ReplicaSeen("bbbb", "starting", detail="weights"),
    ]
    shown.events.append("   9.0 s  kill -9 77: replica cccc, with 4 sequences")
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True, color_system=None).print(screen(shown, 12.0))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) == 80
    for words in (
        "1 of 3 kills",
        "4 exact",
        "6 moved",
        "1 failed",
        "pid 41",
        "8 running",
        "weights",
        "killed",
        "a↵b",
    ):
        assert words in text, words
    for words in ("killed", "a↵b", "✓", "✗", "2.0 s", "differs from token 2", "kill -9 77"):
        assert words in text, words
    assert line(shown, 12.0).endswith("1 kills, 1 replicas ready, 4 exact, 6 moved, 1 failed, longest gap now 2.0 s")


class Server:
    """A cluster of two that loses whoever is killed, and has another a few looks later."""

    def __init__(self) -> None:
        self.alive = {"a": 1, "b": 2}
        self.looks = 0
        self.killed: list[int] = []

    def kill(self, pid: int) -> None:
        self.killed.append(pid)
        self.alive = {name: own for name, own in self.alive.items() if own != pid}
        self.looks = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=f"squadron_migrations_total {3 + len(self.killed)}\n")
        self.looks += 1
        if len(self.alive) < 2 and self.looks > 3:
            self.alive[f"r{self.looks}{len(self.killed)}"] = 10 + len(self.killed)
        replicas = [{"id": name, "pids": [pid]} for name, pid in self.alive.items()]
        states = [{"id": name, "state": "ready", "running": 4, "kv_usage": 0.1} for name in self.alive]
        return httpx.Response(200, json={"ready": True, "replicas": replicas, "states": states})


async def test_the_killer_kills_only_when_all_replicas_serve_and_ends_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.failover.killer.LOOK_SECONDS", 0.001)
    server = Server()
    shown = Board([StreamState(0, tokens=[1])], 3, began=time.monotonic())
    async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(server.answer)) as http:
        killer = Killer(shown, http, 2, 0.0, Random(1), server.kill)
        await asyncio.wait_for(killer.run(lambda board: len(board.kills) >= 3), 10)
    assert len(server.killed) == 3
    assert all(kill.back is not None for kill in shown.kills)
    assert len(server.alive) == 2
    assert shown.migrations == 3


async def test_answers_that_are_under_way_when_it_is_stopped_are_not_counted() -> None:
    asked = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            asked.set()
            await asyncio.Event().wait()
        return httpx.Response(200, json={"ready": False, "replicas": [], "states": []})

    show = Show(Console(file=io.StringIO()), FailoverOptions(streams=2))
    before = asyncio.all_tasks()
    async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as http:
        running = asyncio.create_task(show._stream_and_kill(http, [Question("demo", number, 3) for number in (0, 1)]))
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == before, "a stream would break with the connection and be called failed"
    assert show.board.failed == 0
