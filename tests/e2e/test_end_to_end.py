"""The real openai client against a real Ray Serve app: two replicas, each a tensor-parallel group of two."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from tests.e2e.harness import App, eventually

MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]
PROMPT = "def main():\n"
JSON = {"content-type": "application/json"}


def client(app: App) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0)


def test_models_names_the_served_model(demo_app: App) -> None:
    assert [model.id for model in client(demo_app).models.list()] == ["demo"]


def test_chat_answers_and_streams_the_same_text(demo_app: App) -> None:
    whole = client(demo_app).chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=40)
    with client(demo_app).chat.completions.create(
        model="demo",
        messages=MESSAGES,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 10
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_completion_streams_the_same_text(demo_app: App) -> None:
    arguments = {"model": "demo", "prompt": PROMPT, "temperature": 0.9, "seed": 7, "max_tokens": 24}
    whole = client(demo_app).completions.create(**arguments)
    with client(demo_app).completions.create(**arguments, stream=True) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == whole.choices[0].text
    assert whole.usage.completion_tokens <= 24


async def test_eight_at_once_are_answered_as_if_alone(demo_app: App) -> None:
    prompts = [f"import {name}\n" for name in ("os", "re", "json", "ast", "abc", "cmd", "csv", "dis")]
    async with openai.AsyncOpenAI(base_url=f"{demo_app.url}/v1", api_key="none", max_retries=0) as asynchronous:

        async def ask(prompt: str) -> str:
            answer = await asynchronous.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=30)
            return answer.choices[0].text

        together = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        alone = [await ask(prompt) for prompt in prompts]
    assert together == alone


def test_blocks_are_free_again_after_a_client_hangs_up(demo_app: App) -> None:
    # Eight choices: on a busy machine one alone may have ended before it is looked for.
    body = {"model": "demo", "prompt": PROMPT, "n": 8, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{demo_app.url}/v1/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        next(response.iter_lines())
        eventually(lambda: demo_app.metric("squadron_num_requests_running") >= 1, "the request runs")
    eventually(lambda: demo_app.metric("squadron_num_requests_running") == 0, "the hung-up request is gone")
    eventually(lambda: demo_app.metric("squadron_kv_cache_usage_perc") == 0, "its blocks are free")


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "x " * 40_000}, 400, "prompt"),
        ({"model": "gpt-5"}, 404, "model"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"temperature": float("nan")}, 400, "temperature"),
        ({"n": 1000}, 400, "n"),
        ({"top_kk": 3}, 400, "top_kk"),
    ],
)
def test_bad_input_is_refused_by_name(demo_app: App, change: dict, status: int, param: str) -> None:
    body = {"model": "demo", "prompt": "hello", "max_tokens": 4} | change
    answer = httpx.post(f"{demo_app.url}/v1/completions", content=json.dumps(body), headers=JSON, timeout=30)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"]
    assert answer.headers.get_list("x-request-id") == [answer.json()["error"]["request_id"]]


def test_invalid_json_and_big_bodies_are_refused(demo_app: App) -> None:
    assert (
        httpx.post(f"{demo_app.url}/v1/completions", content=b'{"model": ', headers=JSON, timeout=30).status_code
        == 400
    )
    big = b'{"prompt": "' + b"x" * (5 * 2**20) + b'"}'
    assert httpx.post(f"{demo_app.url}/v1/completions", content=big, headers=JSON, timeout=30).status_code == 413
    assert client(demo_app).completions.create(model="demo", prompt="still", max_tokens=2).choices[0].text is not None


def test_health_and_ready_tell_the_truth(demo_app: App) -> None:
    assert httpx.get(f"{demo_app.url}/health", timeout=10).status_code == 200
    body = demo_app.ready()
    assert body["ready"] is True
    assert len(body["replicas"]) == 2
    assert all(replica["kv_tokens"] > 0 and replica["phases"] for replica in body["replicas"])
    assert all("attention " in replica["engine"] for replica in body["replicas"])


def test_replicas_say_in_time_that_they_know_nothing_of_a_request(demo_app: App) -> None:
    answer = httpx.get(f"{demo_app.url}/why/cmpl-none", timeout=10)
    assert answer.status_code == 404
    assert "no answer from" not in answer.json()["error"]["message"]
