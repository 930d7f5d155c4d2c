"""The app as a server: who may enter, what it says about itself, errors in mid-stream, clients that hang up."""

import asyncio
import json
import logging
import threading

import httpx
import openai
import pytest

from cluster.config_values import ROUTE_ROOTS
from cluster.errors import ApiError
from cluster.http.gate import RootPath
from cluster.telemetry.metrics import Metrics
from engine.errors import PromptTooLongError
from tests.openai_app import MODEL, app_for, client_for, events, saying, served_model, serving

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}
CHAT_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def get(app, path, **headers):
    async with client_for(app) as client:
        return await client.get(path, headers=headers)


async def test_models_are_listed(model):
    app = app_for(saying(model, "ok"), model)
    listed = (await get(app, "/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert (await get(app, f"/v1/models/{MODEL}")).json() == listed["data"][0]
    missing = await get(app, "/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_ready_is_503_until_there_is_progress(model):
    state = {"ready": False, "replicas": []}
    app = app_for(saying(model, "ok"), model, ready=lambda: state)
    not_yet = await get(app, "/ready")
    assert (not_yet.status_code, not_yet.headers["retry-after"]) == (503, "1")
    assert (await get(app, "/health")).status_code == 200
    state["ready"] = True
    assert (await get(app, "/ready")).json() == state


async def test_unknown_paths_and_methods_answer_in_the_errors_own_shape(model):
    app = app_for(saying(model, "ok"), model)
    lost = await get(app, "/v2/completions")
    wrong = await get(app, "/v1/completions")
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert lost.headers["x-request-id"] == lost.json()["error"]["request_id"]


PATHS = [
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/ready",
    "/metrics",
    "/nowhere",
    "/health/",
    "//health",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secret2"]
)
async def test_nothing_but_health_is_open_without_the_key(model, path, authorization):
    app = app_for(saying(model, "ok"), model, api_key="secret")
    headers = {"authorization": authorization} if authorization else {}
    refused = await get(app, path, **headers)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert "secret" not in refused.text
    assert (await get(app, "/health")).status_code == 200


async def test_the_key_opens_every_route(model):
    app = app_for(saying(model, "ok"), model, api_key="secret")
    for path in ("/v1/models", "/ready", "/metrics"):
        assert (await get(app, path, authorization="bearer secret")).status_code == 200


async def test_the_clients_request_id_is_echoed_only(model):
    source = saying(model, "ok")
    async with client_for(app_for(source, model)) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine-1"})
        bad = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "a b\tc"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == source.requests[0].request_id != "mine-1"
    assert bad.headers["x-request-id"] == bad.json()["id"]


@pytest.mark.parametrize("body", [BODY, {**BODY, "stream": True}])
async def test_an_error_before_the_first_token_has_its_own_status(model, body):
    busy = ApiError("overloaded", "the queue is full", retry_after=7)
    source = saying(model, "hello", hold=0, error=busy)
    async with client_for(app_for(source, model)) as client:
        answer = await client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.json()["error"]["retryable"] is True


async def test_what_the_engine_refuses_is_the_clients_error(model):
    source = saying(model, "hello", hold=0, error=PromptTooLongError("prompt does not fit the cache"))
    async with client_for(app_for(source, model)) as client:
        answer = await client.post("/v1/completions", json=BODY)
        chat = await client.post("/v1/chat/completions", json=CHAT_BODY)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "messages")


async def test_an_error_in_mid_stream_is_the_last_event_and_no_done_follows(model):
    source = saying(model, "hello", hold=2, error=ApiError("replica_lost", "no replica is left"))
    async with client_for(app_for(source, model)) as client:
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
    found = events(answer.text)
    assert found[-1]["error"]["code"] == "replica_lost"
    assert found[-1]["error"]["request_id"] == found[0]["id"]
    assert "[DONE]" not in found


async def test_a_fault_inside_is_opaque_to_the_client_and_logged(model, caplog):
    source = saying(model, "hello", hold=1, error=RuntimeError("secret path /etc/x"))
    async with client_for(app_for(source, model)) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["request_id"] in caplog.text
    assert "fake_source.py" in caplog.text  # where it happened; what it says may be a client's (`redacted`)
    assert "secret" not in caplog.text


async def test_one_failing_prompt_ends_the_whole_call_and_aborts_the_others(model):
    source = saying(model, "hello", hold=1, error=ApiError("replica_lost", "gone"))
    async with client_for(app_for(source, model)) as client:
        answer = await client.post("/v1/completions", json={**BODY, "prompt": ["a", "b", "c"]})
    assert answer.status_code == 503
    assert len(source.closed) == 3


async def test_prompts_are_not_logged(model, caplog):
    caplog.set_level(logging.DEBUG)
    source = saying(model, "hello", hold=1, error=ApiError("replica_lost", "gone"))
    async with client_for(app_for(source, model)) as client:
        await client.post("/v1/completions", json={**BODY, "prompt": "my password"})
        await client.post("/v1/completions", json={**BODY, "prompt": "my password", "n": 999})
    assert "password" not in caplog.text


@pytest.mark.parametrize("body", [BODY, {**BODY, "stream": True}, {**BODY, "prompt": ["a", "b"], "stream": True}])
@pytest.mark.parametrize("hold", [0, 2])
async def test_a_client_that_hangs_up_ends_its_request(model, body, hold):
    source = saying(model, "hello there", hold=hold)
    metrics = Metrics()
    app = app_for(source, model, metrics=metrics)
    count = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    async with serving(app) as url, httpx.AsyncClient() as client:
        call = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        while len(source.requests) < count:
            await asyncio.sleep(0.005)
        assert not source.closed
        call.cancel()
        async with asyncio.timeout(5):
            while len(source.closed) < count:
                await asyncio.sleep(0.005)
    ended = f'squadron_request_success_total{{finished_reason="abort",model_name="{MODEL}"}} {count}.0'
    assert ended in metrics.render().decode()


async def test_a_client_that_hangs_up_while_sending_is_no_error(model, caplog):
    source = saying(model, "hello")
    async with serving(app_for(source, model)) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        kind = b"Content-Type: application/json\r\n"
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + kind + b"Content-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        del reader
    assert not source.requests
    assert "Exception" not in caplog.text


def scope_for(path):
    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "root_path": ""}


async def test_a_call_that_the_server_cancels_ends_its_request(model):
    source = saying(model, "hello there", hold=1)
    app = app_for(source, model)
    messages = [{"type": "http.request", "body": json.dumps(BODY).encode()}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        raise AssertionError(f"nothing is to be sent, but {message} was")

    call = asyncio.create_task(app(scope_for("/v1/completions"), receive, send))
    while not source.requests:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert source.closed == [source.requests[0].request_id]


async def test_a_body_that_never_comes_is_given_up(model, monkeypatch):
    monkeypatch.setattr("cluster.http.asgi.BODY_TIMEOUT", 0.01)
    sent = []

    async def send(message):
        sent.append(message)

    app = app_for(saying(model, "ok"), model)
    await app(scope_for("/v1/completions"), asyncio.Event().wait, send)
    assert sent[0]["status"] == 408
    assert b"request_timeout" in sent[1]["body"]


async def test_websockets_are_refused(model):
    sent = []

    async def send(message):
        sent.append(message)

    app = app_for(saying(model, "ok"), model)
    await app({"type": "websocket", "path": "/v1/completions", "headers": []}, asyncio.Event().wait, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_the_real_openai_client_is_served(model):
    source = saying(model, "hello 🚀 world")
    async with serving(app_for(source, model, api_key="k")) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            whole = await client.chat.completions.create(**CHAT_BODY)
            assert whole.choices[0].message.content == "hello 🚀 world"
            text, usage = "", None
            asked = {"stream": True, "stream_options": {"include_usage": True}}
            async for chunk in await client.chat.completions.create(**CHAT_BODY, **asked):
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
            assert text == "hello 🚀 world"
            assert usage.completion_tokens == whole.usage.completion_tokens
            async for part in await client.completions.create(**BODY, stream=True):
                assert part.object == "text_completion"
            assert [card.id async for card in client.models.list()] == [MODEL]
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.completions.create(model="gpt-5", prompt="x")
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model=MODEL, prompt="x", temperature=-1)
            assert caught.value.body["param"] == "temperature"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_the_real_openai_client_hears_of_an_error_in_mid_stream(model):
    source = saying(model, "hello", hold=2, error=ApiError("replica_lost", "no replica is left"))
    async with (
        serving(app_for(source, model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIError, match="no replica is left"):
            async for _ in await client.chat.completions.create(**CHAT_BODY, stream=True):
                pass


async def test_tokenizing_a_long_prompt_leaves_health_answering(tmp_path, monkeypatch):
    roomy = served_model(tmp_path, max_model_len=10**7)
    source = saying(roomy, "ok")
    encode, encoding = roomy.tokenizer.encode, threading.Event()

    def watched(*args, **kwargs):
        encoding.set()
        try:
            return encode(*args, **kwargs)
        finally:
            encoding.clear()

    monkeypatch.setattr(roomy.tokenizer, "encode", watched)
    async with client_for(app_for(source, roomy, max_body_bytes=2**23)) as client:
        body = json.dumps({**BODY, "prompt": "hello world, this is text. " * 50_000}).encode()
        headers = {"content-type": "application/json"}
        call = asyncio.create_task(client.post("/v1/completions", content=body, headers=headers))
        answered = 0
        while not call.done():
            await asyncio.sleep(0.001)  # without a network nothing else would let the call run
            began = encoding.is_set()
            assert (await client.get("/health")).status_code == 200
            answered += began and encoding.is_set()
        assert (await call).status_code == 200
    assert answered > 20


async def test_the_app_works_below_a_mount_point(model):
    app = app_for(saying(model, "ok"), model, api_key="k")
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/v1/models")).status_code == 401
        assert (await client.get("/llm/v1/models", headers={"authorization": "Bearer k"})).status_code == 200


@pytest.mark.parametrize("mount", ["", "/app"])
async def test_below_a_root_path_are_the_same_routes(model, mount):
    app = RootPath(app_for(saying(model, "ok"), model, api_key="k", root_path="/llm"), "/llm")
    transport = httpx.ASGITransport(app, root_path=mount)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        client.headers["authorization"] = "Bearer k"
        for prefix in ("", "/llm"):
            at = mount + prefix
            assert (await client.get(f"{at}/health")).status_code == 200
            answer = await client.post(f"{at}/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"] == "ok"
            document = (await client.get(f"{at}/openapi.json")).json()
            assert document["servers"] == [{"url": "/llm"}]
            refused = (await client.post(f"{at}/v1/messages", json={})).json()
            assert refused["type"] == "error", "in Anthropic's form"
        for path in ("/llmm/health", "/llm", "/llm/llm/health", "/x/llm/health"):
            assert (await client.get(mount + path)).status_code == 404


def test_no_root_path_is_one_that_routes_are_below(model):
    paths = [one.path for one in app_for(saying(model, "ok"), model)._app.routes]
    assert {f"/{first}" for _, first, *more in (path.split("/") for path in paths) if more} == set(ROUTE_ROOTS)


async def test_metrics_tell_what_happened(model):
    now = [0.0]
    metrics = Metrics(clock=lambda: now[0])
    source = saying(model, "hello", chunk=2)
    app = app_for(source, model, metrics=metrics)
    async with client_for(app) as client:
        await client.post("/v1/completions", json=BODY)
        await client.post("/v1/completions", json={**BODY, "n": 999})
        await client.get("/made/up")
        text = (await client.get("/metrics")).text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    name = f'model_name="{MODEL}"'
    assert figures[f"squadron_generation_tokens_total{{{name}}}"] == f"{len(model.tokenizer.encode('hello')) + 1}.0"
    assert figures[f"squadron_prompt_tokens_total{{{name}}}"] == "1.0"
    assert figures[f"squadron_time_to_first_token_seconds_count{{{name}}}"] == "1.0"
    assert figures[f'squadron_request_success_total{{finished_reason="stop",{name}}}'] == "1.0"
    assert figures[f'squadron_http_responses_total{{{name},route="/v1/completions",status="400"}}'] == "1.0"
    assert figures[f'squadron_http_responses_total{{{name},route="other",status="404"}}'] == "1.0"
