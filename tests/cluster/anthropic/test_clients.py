"""What Anthropic's clients see beside messages: keys, versions, errors in their form, models."""

import json

import pytest

from cluster.error_forms import MESSAGES_FORM
from cluster.errors import ApiError
from tests.cluster.anthropic.messages_lab import ASKED, USER, events_of, model_with, post
from tests.openai_app import MODEL, app_for, client_for, saying

KEY = "sk-mine"
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("messages"))


@pytest.mark.parametrize("headers", [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}])
async def test_a_key_comes_in_either_header(model, headers):
    async with client_for(app_for(saying(model, "ok"), model, api_key=KEY)) as client:
        for path in ("/v1/messages", "/v1/chat/completions"):
            answer = await client.post(path, json=ASKED, headers=headers)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "headers", [{}, {"x-api-key": "sk-other"}, {"x-api-key": KEY, "authorization": "Bearer sk-other"}]
)
async def test_without_a_key_the_refusal_has_anthropics_form(model, headers):
    async with client_for(app_for(saying(model, "ok"), model, api_key=KEY)) as client:
        answer = await client.post("/v1/messages", json=ASKED, headers=headers)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
    assert body["request_id"] == answer.headers["request-id"]


async def test_errors_have_anthropics_form(model):
    async with client_for(app_for(saying(model, "ok"), model, max_body_bytes=1000)) as client:
        unknown = await client.post("/v1/messages", json=ASKED | {"model": "claude"})
        large = await client.post("/v1/messages", json=ASKED | {"system": "x" * 2000})
        method = await client.get("/v1/messages")
        json_less = await client.post("/v1/messages", content="{", headers={"content-type": "application/json"})
        absent = await client.post("/v1/messages/batches", json={"requests": []})
        chat = await client.post("/v1/chat/completions", json=ASKED | {"model": "claude"})
    answers = (unknown, large, method, absent)
    found = [(one.status_code, one.json()["type"], one.json()["error"]["type"]) for one in answers]
    assert found == [
        (404, "error", "not_found_error"),
        (413, "error", "request_too_large"),
        (405, "error", "invalid_request_error"),
        (404, "error", "not_found_error"),
    ]
    assert all(one.headers["request-id"] == one.json()["request_id"] for one in answers)
    assert json_less.json()["error"]["code"] == "invalid_json"
    assert "type" not in chat.json()


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("overloaded", 429, "rate_limit_error"),
        ("no_replica", 503, "overloaded_error"),
        ("internal_error", 500, "api_error"),
        ("deadline_exceeded", 504, "timeout_error"),
        ("permission_denied", 403, "permission_error"),
    ],
)
def test_types_of_errors_are_anthropics(code, status, kind):
    error = ApiError(code, "no")
    assert error.status == status
    body = MESSAGES_FORM.body(error.body()["error"])
    assert (body["error"]["type"], body["error"]["code"], body["error"]["message"]) == (kind, code, "no")


async def test_a_stream_that_fails_ends_with_an_error_event(model):
    source = saying(model, "hello world", hold=3, error=ApiError("no_replica", "all gone"))
    answer = await post(source, model, stream=True)
    events = events_of(answer.text)
    assert events[0]["type"] == "message_start"
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "overloaded_error")
    assert events[-1]["error"]["message"] == "all gone"
    assert not any(event["type"] == "message_stop" for event in events)


async def test_other_versions_of_the_api_are_refused(model):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for version in ("2023-01-01", "newest"):
            answer = await post(saying(model, "ok"), model, path=path, headers={"anthropic-version": version})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "anthropic-version"
    for version in ("2023-06-01", "2026-10-21"):
        answer = await post(saying(model, "ok"), model, headers={"anthropic-version": version})
        assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/invocations"])
@pytest.mark.parametrize("header", ["Idempotency-Key", "Last-Event-ID"])
async def test_what_cannot_be_kept_says_so(model, header, path):
    source = saying(model, "ok")
    answer = await post(source, model, path=path, headers={header: "1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, header)
    assert not source.requests


async def test_models_are_listed_in_anthropics_form_to_who_names_its_version(model):
    async with client_for(app_for(saying(model, "ok"), model)) as client:
        plain = (await client.get("/v1/models")).json()
        listed = (await client.get("/v1/models", headers=VERSION)).json()
        one = (await client.get(f"/v1/models/{MODEL}", headers=VERSION)).json()
        none = await client.get("/v1/models/claude", headers=VERSION)
        none_plain = (await client.get("/v1/models/claude")).json()
    assert (none.status_code, none.json()["type"], none.json()["error"]["type"]) == (404, "error", "not_found_error")
    assert none.json()["request_id"] == none.headers["request-id"]
    assert set(none_plain) == {"error"}
    assert set(plain) == {"object", "data"}
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, MODEL)
    assert listed["data"] == [one]
    assert (one["type"], one["display_name"], one["created_at"]) == ("model", MODEL, "2023-11-14T22:13:20Z")
    assert one["max_input_tokens"] == one["max_tokens"] == model.max_model_len


async def test_figures_and_logs_know_the_route(model):
    app = app_for(saying(model, "ok"), model)
    async with client_for(app) as client:
        await client.post("/v1/messages", json=ASKED)
        await client.post("/v1/messages?beta=true", json=ASKED | {"messages": [USER, USER]})
        figures = (await client.get("/metrics")).text
    assert 'squadron_http_responses_total{model_name="demo",route="/v1/messages",status="200"} 2.0' in figures
    assert "squadron_generation_tokens_total" in figures
    assert json.dumps(ASKED["messages"]) not in figures
