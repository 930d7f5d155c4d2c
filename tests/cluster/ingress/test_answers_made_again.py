"""An answer that another router goes on with, after any of its messages, has the bytes that it would have had."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from cluster.answer_log import CONTINUES, ELAPSED, KEEPS, KEPT, NOTES, AnswerLog
from cluster.ingress.router_side import IngressCheck
from tests.cluster.openai.test_openai_chat_tools import CALL, CHAT, TOOLS, model
from tests.fake_source import FakeSource
from tests.openai_app import MODEL, app_for

__all__ = ["model"]  # a fixture
THOUGHT = "<think>\nSo it is, or not.\n</think>\n\nYes: "
TALK = {"model": MODEL, "messages": CHAT, "stream": True, "max_tokens": 300, "seed": 4}
TEXT = {"model": MODEL, "prompt": ["one", "two three"], "stream": True, "max_tokens": 300, "seed": 4}
MESSAGE = {"model": MODEL, "messages": CHAT[-1:], "stream": True, "max_tokens": 300, "seed": 4}
REPLY = {"model": MODEL, "input": "weather?", "stream": True}
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "thoughts and two calls": (
        "/v1/chat/completions", THOUGHT + CALL + "\n" + CALL, TALK | {"tools": TOOLS, "parallel_tool_calls": True},
    ),
    "one call": ("/v1/chat/completions", CALL, TALK | {"tools": TOOLS, "parallel_tool_calls": False}),
    "scored thoughts": ("/v1/chat/completions", THOUGHT + "Köln 🚀", TALK | {"logprobs": True, "top_logprobs": 2}),
    "usage as it grows": (
        "/v1/chat/completions", "Köln 🚀 and on",
        TALK | {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "stop strings": ("/v1/completions", "first second third", TEXT | {"n": 2, "stop": ["third", "cond"]}),
    "echo": ("/v1/completions", "and Köln 🚀", TEXT | {"echo": True, "logprobs": 2, "return_token_ids": True}),
    "response with a call": (
        "/v1/responses", THOUGHT + CALL,
        REPLY | {"tools": [{"type": "function", **TOOLS[0]["function"]}]},
    ),
    "scored response": (
        "/v1/responses", THOUGHT + "Köln 🚀 it is",
        REPLY | {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "message with thoughts and two calls": (
        "/v1/messages", THOUGHT + CALL + "\n" + CALL,
        MESSAGE | {"tools": [{"name": TOOLS[0]["function"]["name"], "input_schema": {"type": "object"}}]},
    ),
    "thoughts that were ended": (
        "/v1/chat/completions", THOUGHT + "Köln 🚀 and on", TALK | {"thinking_token_budget": 9},
    ),
    "message with a stop sequence": ("/v1/messages", "Köln 🚀 and on", MESSAGE | {"stop_sequences": ["nd"]}),
}  # fmt: skip


class GoingOn(FakeSource):
    """A source that goes on behind a request's log."""

    def _plan(self, request, choice):
        return super()._plan(request, choice)[len((request.resume or {}).get(choice, ())) :]

    def _prompt_chunks(self, request):
        told = max(request.num_scored_tokens - 1, 0)
        scored = [one for chunk in super()._prompt_chunks(request) for one in chunk.prompt_logprobs][told:]
        whole = super()._prompt_chunks(request)
        return whole if not told else [chunk for chunk in whole if set(chunk.prompt_logprobs) <= set(scored)]


async def answer(model, text: str, path: str, asked: dict[str, Any], notes: list[bytes] | None = None) -> list[Any]:
    """Return the messages of a router that answers, after another one if there are `notes`."""
    tokens = [*model.tokenizer.encode(text), model.tokenizer.eos_token_id]
    source = GoingOn(lambda *_: tokens, eos=model.tokenizer.eos_token_id)
    sent: list[dict[str, Any]] = []
    body = iter([{"type": "http.request", "body": json.dumps(asked).encode()}])

    async def receive() -> Any:
        return next(body, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers, KEEPS: True}
    await IngressCheck(app_for(source, model))(
        scope if notes is None else scope | {CONTINUES: {NOTES: notes, ELAPSED: 0.0}}, receive, send
    )
    assert sent[0]["status"] == 200, sent[1]["body"]
    return sent


def body_of(messages: list[Any]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def parts_of(body: bytes) -> list[str]:
    """Return the frames by choice, each choice's in order: how choices take turns is open where the rest begins."""
    frames = [frame for frame in re.sub(r'"usage":\{.*\}', "", body.decode()).split("\n\n") if frame]
    return sorted(frames, key=lambda frame: (re.findall(r'"index":(\d+)', frame) or ["9"])[0])


@pytest.mark.parametrize("kind", ASKED)
async def test_it_is_the_same_wherever_it_was_cut(model, kind, monkeypatch):
    path, text, asked = ASKED[kind]
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)  # of the last message, which no router is lost after
    first = await answer(model, text, path, asked)
    whole = body_of(first)
    assert whole.count(b"data: ") > 10
    for cut in range(1, len(first)):
        notes = [message[KEPT] for message in first[:cut] if KEPT in message]
        again = await answer(model, text, path, asked, notes)
        had = body_of(first[:cut])
        assert body_of(again).startswith(had), f"after message {cut}"
        assert parts_of(body_of(again)) == parts_of(whole), f"after message {cut}"
        # What is kept of both is what is kept of one: the next router may be lost, too.
        third = await answer(model, text, path, asked, notes + [one[KEPT] for one in again if KEPT in one][:2])
        assert body_of(third).startswith(had), f"after message {cut}, and once more"
        assert parts_of(body_of(third)) == parts_of(whole), f"after message {cut}, and once more"


async def test_what_another_version_makes_another_prompt_of_is_refused(model):
    path, text, asked = ASKED["echo"]
    first = await answer(model, text, path, asked)
    notes = [message[KEPT] for message in first[:4] if KEPT in message]
    with pytest.raises(AssertionError, match="model_changed"):
        await answer(model, text, path, asked | {"prompt": ["one", "two tree"]}, notes)


@pytest.mark.parametrize(("keeps", "name"), [(True, ""), (False, ""), ("", ""), ("one", "one")])
def test_an_ingress_of_an_earlier_version_names_no_exchange(keeps, name):
    assert AnswerLog.of({KEEPS: keeps}).exchange == name
