"""Deadlines through Serve's proxy, which knows the header too and would cut a late stream off without a word."""

from __future__ import annotations

import httpx
import pytest

from cluster.admission.deadline import HEADER
from tests.e2e.harness import App, eventually
from tests.openai_app import events

LONG = {"model": "demo", "prompt": "def f():\n", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


def ask(app: App, timeout: str, **fields) -> httpx.Response:
    return httpx.post(f"{app.url}/v1/completions", json=LONG | fields, headers={HEADER: timeout}, timeout=30)


def test_a_late_stream_ends_in_a_typed_error_and_its_blocks_are_free(demo_app: App) -> None:
    late = httpx.post(
        f"{demo_app.url}/v1/completions", json=LONG | {"stream": True}, headers={HEADER: "1.5"}, timeout=30
    )
    assert late.status_code == 200
    *tokens, last = events(late.text)
    assert last["error"]["code"] == "deadline_exceeded"
    assert tokens, "it ran until then"
    eventually(lambda: demo_app.metric("squadron_kv_cache_usage_perc") == 0, "all blocks are free", 5)


def test_a_late_answer_is_a_typed_504(demo_app: App) -> None:
    late = ask(demo_app, "1.5")
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("bad", ["-1", "soon", "0"])
def test_a_bad_deadline_is_refused_by_name(demo_app: App, bad: str) -> None:
    refused = ask(demo_app, bad)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, HEADER)
