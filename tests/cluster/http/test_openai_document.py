"""The API document: it fits the server, and nothing made from it, or against it, gets a 5xx."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import unquote

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from cluster.http.openapi import OPERATIONS, openapi
from cluster.http.sites import Sites
from tests.openai_app import MODEL, app_for, client_for, saying, served_model
from tests.storage_app import BATCH, FORM, upload_form

EXAMPLES = 40  # of each route and kind; some 5 ms each


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    model = served_model(tmp_path_factory.mktemp("model"))
    store = Store(open_root(str(tmp_path_factory.mktemp("kept"))), 10_000)
    # The client that calls what is made of the document goes by this name.
    sites = Sites(hosts=("testserver",))
    return app_for(saying(model, "hello 🚀"), model, store=store, sites=sites, drain=lambda *_: [])


class Sleeper:
    """A model that falls asleep and wakes up when it is told to."""

    model_id = MODEL
    is_sleeping = False

    async def sleep(self, level, mode):
        self.is_sleeping = True

    async def wake_up(self, tags):
        self.is_sleeping = False

    def public(self):
        return {"level": int(self.is_sleeping)}


KEYED = ("/drain", "/sleep", "/wake_up", "/is_sleeping")


@pytest.fixture(scope="module")
def keyed_app(tmp_path_factory):
    model = served_model(tmp_path_factory.mktemp("model"))
    operated = {"drain": lambda *_: ["01"], "sleeping": [Sleeper()]}
    return app_for(saying(model, "hello"), model, api_key="secret", **operated)


@pytest.fixture(scope="module")
def there(app):
    """Ids that paths and bodies can name: of a file, of a batch that needs it, of a response and of a chat."""

    async def make():
        async with client_for(app) as client:
            file = (await client.post("/v1/files", content=upload_form(), headers=FORM)).json()["id"]
            made = await client.post("/v1/batches", json=BATCH | {"input_file_id": file})
            kept = (await client.post("/v1/responses", json=PLAIN["/v1/responses"] | {"background": True})).json()
            await client.get(f"/v1/responses/{kept['id']}?stream=true")  # to its end
            path = "/v1/chat/completions"
            chat = (await client.post(path, json=PLAIN[path], headers={"idempotency-key": "one"})).json()
            return {"file": file, "batch": made.json()["id"], "response": kept["id"], "chat": chat["id"]}

    return asyncio.run(make())


def always_up(app):
    """The app without its lifespan, which would end with the first call."""

    async def call(scope, receive, send):
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})

    return call


async def test_the_document_is_served_and_names_every_request_field(app):
    async with client_for(app) as client:
        document = (await client.get("/openapi.json")).json()
    assert document == openapi(keyed=False)
    assert document["paths"]["/drain"]["post"]["requestBody"]
    for one in OPERATIONS:
        if one.request is not None:
            named = document["components"]["schemas"][one.request.__name__]["properties"]
            fields = one.request.model_fields.items()
            assert set(named) == {field.alias or name for name, field in fields}


async def test_the_document_asks_for_a_key_only_where_there_are_any(app, tmp_path):
    model = served_model(tmp_path)
    async with client_for(app) as client:
        open_to_all = (await client.get("/openapi.json")).text
    async with client_for(app_for(saying(model, "ok"), model, api_key="secret")) as client:
        keyed = (await client.get("/openapi.json", headers={"authorization": "Bearer secret"})).json()
    assert '"security' not in open_to_all
    assert keyed["security"] == [{"key": []}, {"anthropic_key": []}]
    assert keyed["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert keyed["paths"]["/health"]["get"]["security"] == []


POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
CALLS = [(one, mode) for one in OPERATIONS for mode in (POSITIVE, NEGATIVE) if one.request or mode is POSITIVE]
# Most of what is made at random has something wrong; a few random fields around these have less.
PLAIN = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"model": MODEL, "input": "hi"},
    "/v1/score": {"model": MODEL, "text_1": "hi", "text_2": ["ho", "hi"]},
    "/v1/rerank": {"model": MODEL, "query": "hi", "documents": ["ho", "hi"]},
    "/tokenize": {"model": MODEL, "prompt": "hi", "messages": None},
}


def given_what_is_there(case, there):
    """Name in a made-up call what there is."""
    if "id" in (case.path_parameters or {}):
        case.path_parameters = {"id": there["file" if "files" in case.path else "batch"]}
    if "response_id" in (case.path_parameters or {}):
        case.path_parameters = {"response_id": there["response"]}
    if "completion_id" in (case.path_parameters or {}):
        case.path_parameters = {"completion_id": there["chat"]}
    if case.path == "/v1/batches" and isinstance(case.body, dict):
        case.body = dict(case.body) | BATCH | {"input_file_id": there["file"], "metadata": None}
        case.body.pop("output_expires_after", None)


@pytest.mark.parametrize(("one", "mode"), CALLS, ids=lambda value: getattr(value, "name", None) or value.value)
def test_no_request_made_from_the_document_gets_a_5xx(app, keyed_app, there, one, mode):
    schema = schemathesis.openapi.from_dict(openapi())
    schema.app = always_up(keyed_app if one.path in KEYED else app)
    headers = {"authorization": "Bearer secret"} if one.path in KEYED else {}
    checks = [not_a_server_error, response_schema_conformance, content_type_conformance]
    answers = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=schema[one.path][one.method].as_strategy(generation_mode=mode), kept=st.integers(0, 4))
    def calls(case, kept):
        if kept and one.path in PLAIN and isinstance(case.body, dict):
            case.body = dict(list(case.body.items())[-kept:]) | PLAIN[one.path]
        if kept:
            given_what_is_there(case, there)
        answers.add(case.call_and_validate(checks=checks, headers=headers).status_code)

    calls()
    if one.method == "delete" and "files" in one.path:
        assert 409 in answers, "the batch needs it"
    else:
        assert (400 if mode is NEGATIVE else 200) in answers


HOSTILE = [
    "7" * 6000,
    "%D9%A3" * 30,
    "-1",
    "",
    "%00",
    "%ED%A0%80",
    "%FF",
    "%",
    "x" * 60_000,
    "..%2F..",
    "1e999",
    "[" * 999,
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: value[:9])
async def test_no_parameter_of_a_path_or_a_query_gets_a_5xx(app, keyed_app, there, value):
    """As it was sent, for clients mend such an address; of what is there, too."""
    document = openapi()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            target = keyed_app if path in KEYED else app
            of_query = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
            ids = {"{id}": there["file" if "files" in path else "batch"], "{response_id}": there["response"]}
            known = ids.get(next(iter(re.findall(r"{\w+}", path)), ""), "x")
            for name, place in ((name, known) for name in (*of_query, "other", "model")):
                if method == "get":
                    await refused(target, method, re.sub(r"{\w+}", place, path), f"{name}={value}")
            await refused(target, method, re.sub(r"{\w+}", value, path), "")


async def refused(app, method, path, query):
    """Call a route with an address that may be none."""
    sent, left = [], [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def send(message):
        sent.append(message)

    async def receive():
        return left.pop() if left else {"type": "http.disconnect"}

    host = [(b"host", b"testserver"), (b"authorization", b"Bearer secret"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method.upper(), "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": host, "client": ("127.0.0.1", 1), "server": ("testserver", 80), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    assert not sent or sent[0]["status"] < 500, (method, path[:80], query[:80])
