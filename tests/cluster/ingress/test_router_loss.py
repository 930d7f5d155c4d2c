"""Answers whose routers die under them: clients get what they would have got, once, whatever kind of answer it is."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from random import Random
from typing import Any

import pytest

from cluster.accounts.flight_recorder import is_of
from cluster.answer_log import CONTINUES, ELAPSED, KEEPS, NOTES, AnswerFacts, AnswerLog
from cluster.ingress.guard import MOST_TRIES
from cluster.ingress.router_side import IngressCheck
from cluster.openai.choices import Choice, Delta
from cluster.openai.generation import REPLAYED_AT_ONCE
from cluster.token_source import TokenChunk
from tests.cluster.cluster_lab import until
from tests.cluster.ingress.router_lab import LabRouter, RouterLab
from tests.fake_source import FakeSource
from tests.openai_app import MODEL, app_for, served_model

TOKENS = 300
COMPLETION = {"model": MODEL, "prompt": "once", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
CHAT = {
    "model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS, "ignore_eos": True,
    "stream": True,
}  # fmt: skip
RESPONSE = {"model": MODEL, "input": "hi", "max_output_tokens": TOKENS, "ignore_eos": True, "stream": True}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", COMPLETION | {"temperature": 0, "return_token_ids": True}),
    "drawn": ("/v1/completions", COMPLETION | {"seed": 5, "stream_options": {"include_usage": True}}),
    "several": ("/v1/completions", COMPLETION | {"prompt": ["a", "bc"], "n": 2, "seed": 3, "return_token_ids": True}),
    "scored": ("/v1/completions", COMPLETION | {"seed": 1, "logprobs": 3, "echo": True}),
    "stopped": ("/v1/completions", COMPLETION | {"seed": 1, "n": 3, "stop": ["e", "a"], "min_tokens": 200}),
    "chat": ("/v1/chat/completions", CHAT | {"seed": 2, "logprobs": True, "top_logprobs": 2}),
    "usage": (
        "/v1/chat/completions",
        CHAT | {"seed": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "response": ("/v1/responses", RESPONSE | {"temperature": 0, "include": ["message.output_text.logprobs"]}),
    "message": ("/v1/messages", CHAT | {"temperature": 0}),
    "whole": ("/v1/completions", COMPLETION | {"stream": False, "seed": 4, "n": 2}),
    "whole scored": (
        "/v1/completions",
        COMPLETION | {"stream": False, "seed": 4, "prompt": "some words", "prompt_logprobs": 2, "logprobs": 1},
    ),
    "whole response": ("/v1/responses", RESPONSE | {"stream": False, "temperature": 0}),
}
UNSEEDED = COMPLETION | {"temperature": 1.0, "return_token_ids": True}


async def said(lab: RouterLab, path: str, asked: dict[str, Any]) -> Any:
    """What an answer says, without what differs from one answer to the next, and however it was cut into frames."""
    response = await lab.client.post(path, json=asked, timeout=60)
    assert response.status_code == 200, response.text
    if not asked["stream"]:
        return _plain(response.json())
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "", "the last event is cut"
    frames = [block.rpartition("\ndata: ")[2].removeprefix("data: ") for block in blocks if not block.startswith(":")]
    if path not in ("/v1/responses", "/v1/messages"):
        assert frames.pop() == "[DONE]"
    found = [json.loads(frame) for frame in frames]
    assert not any("error" in one for one in found), found[-1]
    if path == "/v1/responses":
        assert [one["sequence_number"] for one in found] == list(range(len(found)))
        assert len({one["item_id"] for one in found if "item_id" in one}) == 1
        kinds = [one["type"] for one in found if not one["type"].endswith(".delta")]
        return kinds, "".join(one["delta"] for one in found if "delta" in one), _plain(found[-1]["response"])
    if path == "/v1/messages":
        kinds = [one["type"] for one in found if not one["type"].endswith("block_delta")]
        return kinds, "".join(one["delta"].get("text", "") for one in found if "delta" in one), found[-2]
    assert len({(one["id"], one["created"]) for one in found}) == 1
    return _joined(found)


def _joined(frames: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Put the frames of each choice together; every list and text goes on where it was."""
    whole: dict[int, dict[str, Any]] = {}
    for frame in frames:
        if not frame["choices"]:
            whole[-1] = frame["usage"]
        for choice in frame["choices"]:
            own = whole.setdefault(choice["index"], {"roles": 0, "ends": [], "text": "", "ids": [], "scores": []})
            delta = choice.get("delta", {})
            own["roles"] += "role" in delta
            own["text"] += choice.get("text") or delta.get("content") or ""
            own["ids"] += choice.get("token_ids") or []
            own["scores"] += _scores(choice.get("logprobs"))
            own["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return whole


def _scores(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("tokens", "token_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True))


def _plain(body: dict[str, Any]) -> str:
    text = re.sub(r'"(id|item_id)": "[a-z]+[_-][0-9a-f]+"', '"id": "x"', json.dumps(body))
    return re.sub(r'"(created|created_at|completed_at)": \d+', '"at": 0', text)


CARRIERS = pytest.mark.parametrize("gateway", [False, True], ids=["serve", "gateway"])


@pytest.mark.parametrize(
    ("kind", "gateway"),
    [(kind, False) for kind in ASKED] + [(kind, True) for kind in ("greedy", "several", "response", "whole scored")],
)
async def test_an_answer_is_what_it_would_have_been(tmp_path, kind, gateway):
    path, asked = ASKED[kind]
    rng = Random(kind)
    pace = 0.003 if asked["stream"] else 0.01  # a router tells what is to be kept of a whole answer by the clock
    async with RouterLab(tmp_path, pace=pace, gateway=gateway) as lab:
        undisturbed = await said(lab, path, asked)
        striking = asyncio.create_task(lab.struck(rng, asked["stream"]))
        found = await asyncio.gather(*(said(lab, path, asked) for _ in range(8)))
        striking.cancel()
        assert lab.killed > 1
    assert all(one == undisturbed for one in found)


async def test_what_was_drawn_without_a_seed_goes_on_with_the_same_draws(tmp_path, monkeypatch):
    """The tokens that come after a loss are those that the first router's seed would have given."""
    seeds = iter(range(7, 1000))
    async with RouterLab(tmp_path) as lab:
        monkeypatch.setattr("cluster.openai.validation.secrets.randbits", lambda _: next(seeds))
        undisturbed = await said(lab, "/v1/completions", UNSEEDED | {"seed": 7})
        lab.on_message = lambda router: lab.kill(router) if router.said == 20 else None
        assert await said(lab, "/v1/completions", UNSEEDED) == undisturbed
        assert lab.killed and next(seeds) > 8


async def test_a_long_answer_is_made_again_in_little_turns(tmp_path, monkeypatch):
    """A router that goes on with one answer has time for others all the while: they would take it for dead."""
    turns, at, take = 0, [], Choice.take  # at: the turn of the event loop in which each chunk was taken

    def noted(choice: Choice, chunk: TokenChunk) -> Delta:
        at.append(turns)
        return take(choice, chunk)

    monkeypatch.setattr(Choice, "take", noted)

    async def look() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    eos = served_model(tmp_path).tokenizer.eos_token_id
    source = FakeSource(lambda *_: [5] * 6000, eos=eos)
    model = served_model(tmp_path, max_model_len=100_000)
    log = AnswerLog()
    log.begin(AnswerFacts("cmpl-1", 1, 1))
    for _ in range(20_000):
        log.add(0, TokenChunk(0, (5,), fingerprint="f"))
    note = log.take()
    asked = json.dumps(COMPLETION | {"max_tokens": 20_010, "seed": 1}).encode()
    sent: list[dict[str, Any]] = []

    async def send(message) -> None:
        sent.append(message)

    messages = iter([{"type": "http.request", "body": asked}])

    async def receive() -> dict[str, Any]:
        return next(messages, None) or await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", KEEPS: True,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        CONTINUES: {NOTES: [note], ELAPSED: 1.0},
    }  # fmt: skip
    looking = asyncio.create_task(look())
    await IngressCheck(app_for(source, model))(scope, receive, send)
    looking.cancel()
    assert sent[0]["status"] == 200, sent[1]
    assert b"".join(one.get("body", b"") for one in sent).count(b"data: ") > 20_000
    assert len(at) > 20_000
    assert Counter(at).most_common(1)[0][1] <= REPLAYED_AT_ONCE + 1


@CARRIERS
async def test_the_only_router_is_waited_for_and_the_stream_shows_that_it_lives(tmp_path, gateway):
    async with RouterLab(tmp_path, routers=1, gateway=gateway) as lab:
        undisturbed = await said(lab, "/v1/completions", ASKED["greedy"][1])
        last = lab.routers[0].said + 20
        lab.on_message = lambda router: lab.kill(router, 0.5) if router.said == last and not lab.killed else None
        assert await said(lab, "/v1/completions", ASKED["greedy"][1]) == undisturbed
        assert lab.killed == 1


async def test_an_answer_keeps_its_name_for_those_who_ask_what_it_waits_for(tmp_path):
    """`squadron why NAME` finds it at the next router, too, where the lost one may have it still."""
    async with RouterLab(tmp_path, routers=1, pace=0.002) as lab:
        names: set[str] = set()

        def strike(router: LabRouter) -> None:
            names.update(router.dispatcher._live)
            if router.said == 20 and not lab.killed:
                lab.kill(router)

        lab.on_message = strike
        answer = await lab.client.post("/v1/completions", json=COMPLETION, timeout=60)
        shown = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))["id"]
        assert len(names) == 2
        assert all(is_of(name, shown) for name in names)


@CARRIERS
async def test_where_no_router_comes_in_time_the_error_says_so(tmp_path, gateway):
    async with RouterLab(tmp_path, routers=1, router_wait=0.3, gateway=gateway) as lab:
        lab.on_message = lambda router: lab.kill(router, None) if router.said == 20 else None
        answer = await lab.client.post("/v1/completions", json=COMPLETION, timeout=60)
        error = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["error"]
        assert (error["code"], error["retryable"]) == ("router_lost", True)
        await lab.add()


@CARRIERS
async def test_nobody_waits_for_a_router_beyond_the_time_that_its_client_gave(tmp_path, gateway):
    timeout = {"x-request-timeout-seconds": "1.0"}
    async with RouterLab(tmp_path, routers=1, gateway=gateway) as lab:
        lab.on_message = lambda router: lab.kill(router, None) if router.said == 20 else None
        answer = await lab.client.post("/v1/completions", json=COMPLETION, headers=timeout, timeout=30)
        error = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["error"]
        assert (error["code"], error["retryable"]) == ("deadline_exceeded", False)
        answer = await lab.client.post("/v1/completions", json=COMPLETION, headers=timeout, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        await lab.add()


@CARRIERS
async def test_a_stopped_router_is_left_and_nothing_that_it_says_later_is_believed(tmp_path, monkeypatch, gateway):
    monkeypatch.setattr("cluster.ingress.attempt.TICK", 0.2)
    monkeypatch.setattr("cluster.ingress.router_side.BEAT", 0.2)
    monkeypatch.setattr("cluster.ingress.router_side.NOTE_AFTER", 0.05)
    async with RouterLab(tmp_path, gateway=gateway) as lab:
        path, asked = ASKED["greedy"]
        undisturbed = await said(lab, path, asked)
        stopped = []

        def stop(router: LabRouter) -> None:
            if router.said == 40 and not stopped:
                router.runs.clear()
                stopped.append(router)

        lab.on_message = stop
        assert await asyncio.gather(*(said(lab, path, asked) for _ in range(4))) == [undisturbed] * 4
        assert stopped
        stopped[0].runs.set()
        assert await said(lab, path, asked) == undisturbed


@pytest.fixture
def quick_lease(monkeypatch) -> None:
    """All of silence in a tenth of the time."""
    for module in ("attempt", "router_pool"):
        monkeypatch.setattr(f"cluster.ingress.{module}.TICK", 0.1)
    monkeypatch.setattr("cluster.ingress.router_side.BEAT", 0.1)
    monkeypatch.setattr("cluster.ingress.router_side.NOTE_AFTER", 0.025)
    monkeypatch.setattr("cluster.ingress.router_link.BEAT", 0.1)


@pytest.mark.usefixtures("quick_lease")
@pytest.mark.parametrize("path", ["/v1/batches", "/v1/files", "/drain"])
async def test_whoever_asks_a_silent_router_first_waits_for_a_lease(tmp_path, path):
    """Its connections stand and it says nothing, from before the gateway's first exchange on."""
    async with RouterLab(tmp_path, gateway=True) as lab:
        for router in lab.routers:
            router.runs.clear()
        async with asyncio.timeout(10):
            answer = await lab.client.post(path, json=COMPLETION)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "router_lost")


@pytest.mark.usefixtures("quick_lease")
@pytest.mark.parametrize("path", ["/v1/batches", "/v1/completions"])
async def test_who_comes_before_the_first_router_waits_for_longer_than_a_lease(tmp_path, path):
    async with RouterLab(tmp_path, routers=0, gateway=True) as lab:
        waiting = asyncio.create_task(lab.client.post(path, json={"model": MODEL}, timeout=60))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        await lab.add()
        assert (await waiting).status_code in (400, 404)


@pytest.mark.usefixtures("quick_lease")
async def test_serves_proxy_leaves_a_silent_router_as_soon_as_it_knows_that_routers_speak(tmp_path):
    async with RouterLab(tmp_path) as lab:
        silent = lab.routers[0]
        silent.runs.clear()
        waiting = asyncio.create_task(lab.client.post("/v1/batches", json={}, timeout=60))
        await until(lambda: silent.asked)
        assert (await lab.client.get("/v1/models")).status_code == 200
        async with asyncio.timeout(10):
            answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "router_lost")


@pytest.mark.usefixtures("quick_lease")
async def test_a_router_that_was_left_is_not_asked_again_at_once(tmp_path):
    """It has the lowest load of all, and its other connection still says that it lives."""
    path, asked = ASKED["greedy"]
    async with RouterLab(tmp_path, pace=0.01, gateway=True) as lab:
        silent, other = lab.routers
        undisturbed = await said(lab, path, asked)
        silent.runs.clear()
        before = silent.asked
        found = await asyncio.gather(*(said(lab, path, asked) for _ in range(4)))
        found += await asyncio.gather(*(said(lab, path, asked) for _ in range(3)))
        assert found == [undisturbed] * 7
        assert silent.asked - before <= 4
        assert other.asked >= 7
        silent.runs.set()


@CARRIERS
async def test_a_request_of_which_every_router_dies_is_given_up(tmp_path, gateway):
    async with RouterLab(tmp_path, routers=3, gateway=gateway) as lab:
        lab.on_message = lambda router: lab.kill(router)
        answer = await lab.client.post("/v1/completions", json=COMPLETION | {"stream": False}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "router_lost")
        assert lab.killed <= MOST_TRIES
        lab.on_message = lambda _: None


@CARRIERS
async def test_uploads_are_not_asked_twice(tmp_path, gateway):
    async with RouterLab(tmp_path, gateway=gateway) as lab:
        lab.on_message = lambda router: lab.kill(router)
        answer = await lab.client.post("/v1/batches", json={"input_file_id": "x"}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "router_lost")
        assert lab.killed == 1
        lab.on_message = lambda _: None
