"""Routes of other servers: scores and ranks, SageMaker's, lm-eval's tokenizer, the load, the page of the document."""

import re

import numpy as np
import pytest

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.capacity import UNBOUNDED
from cluster.ingress.exchange import REPEATED
from cluster.telemetry.metrics import Metrics
from cluster.telemetry.tracing.semantics import HTTP_OPERATIONS
from tests.cluster.http.test_openai_embeddings import Pools
from tests.openai_app import MODEL, app_for, client_for, front_for, saying, served_model, two_models_app
from tests.storage_app import two_tenants

TEXTS = ["one", "another text", "third"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def post(source, model, path, **body):
    async with client_for(app_for(source, model)) as client:
        return await client.post(path, json={"model": MODEL} | body)


def cosine(model, one, other):
    states = [np.array(Pools().state(model.tokenizer.encode(text))) for text in (one, other)]
    return float(states[0] @ states[1] / np.linalg.norm(states[0]) / np.linalg.norm(states[1]))


async def test_scores_are_cosines_of_embeddings(model):
    body = (await post(Pools(), model, "/v1/score", text_1="one", text_2=TEXTS)).json()
    assert [one["index"] for one in body["data"]] == [0, 1, 2]
    assert [one["score"] for one in body["data"]] == pytest.approx([cosine(model, "one", text) for text in TEXTS])
    assert body["data"][0]["score"] == pytest.approx(1.0)
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert body["id"].startswith("score-")
    tokens = sum(len(model.tokenizer.encode(text)) for text in ["one", *TEXTS])
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_as_many_firsts_as_seconds_are_pairs(model):
    body = (await post(Pools(), model, "/v1/score", text_1=TEXTS, text_2=TEXTS[::-1])).json()
    pairs = zip(TEXTS, TEXTS[::-1], strict=True)
    assert [one["score"] for one in body["data"]] == pytest.approx([cosine(model, *pair) for pair in pairs])


async def test_documents_are_sorted_by_how_alike_they_are(model):
    asked = {"query": "one", "documents": TEXTS[::-1]}
    body = (await post(Pools(), model, "/v1/rerank", **asked)).json()
    scores = [cosine(model, "one", text) for text in TEXTS[::-1]]
    best = sorted(range(3), key=lambda i: -scores[i])
    assert [one["index"] for one in body["results"]] == best
    assert [one["relevance_score"] for one in body["results"]] == pytest.approx([scores[i] for i in best])
    assert body["results"][0]["document"] == {"text": asked["documents"][best[0]]}
    first = (await post(Pools(), model, "/v1/rerank", **asked, top_n=1, return_documents=False)).json()
    assert [set(one) for one in first["results"]] == [{"index", "relevance_score"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["a"] * 1100, "text_2": ["a"] * 1100}, "text_2"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"queries": "a", "documents": ["a"]}, "queries"),
        ("/v1/score", {"data_1": "a", "data_2": ["a"]}, "data_1"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a", "b " * 300]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
async def test_the_first_wrong_field_is_named(model, path, body, param):
    source = Pools()
    answer = await post(source, model, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not source.requests


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "chat.completion"),
        ({"prompt": "hi", "model": MODEL}, "text_completion"),
        ({"input": "hi"}, "list"),
        ({"text_1": "a", "text_2": "b"}, "list"),
        ({"query": "a", "documents": ["b"]}, None),
    ],
)
async def test_an_invocation_is_what_its_body_says(model, body, kind):
    source = saying(model, "ok") if kind and "completion" in kind else Pools()
    async with client_for(app_for(source, model)) as client:
        answer = await client.post("/invocations", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json().get("object") == kind
    assert answer.json()["model"] == MODEL


async def test_an_invocation_of_nothing_known_says_what_is(model):
    async with client_for(app_for(saying(model, "ok"), model)) as client:
        answer = await client.post("/invocations", json={"inputs": "hi"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "messages, prompt, input, documents, text_1" in answer.json()["error"]["message"]


async def test_a_ping_tells_without_a_key_whether_requests_are_served(model):
    for ready, status in ((True, 200), (False, 503)):
        app = app_for(saying(model, "ok"), model, api_key="secret", ready=lambda ready=ready: {"ready": ready})
        async with client_for(app) as client:
            assert (await client.get("/ping")).status_code == status


async def test_the_load_is_what_runs_or_waits(model):
    source = saying(model, "ok", hold=1)
    admission = AdmissionQueue(source, lambda: UNBOUNDED)
    async with client_for(app_for(source, model, admission=admission)) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
    keyed = app_for(source, model, tenancy=two_tenants())
    async with client_for(keyed) as client:
        told = await client.get("/load", headers={"authorization": "Bearer sk-a"})
    assert (told.status_code, told.json()["error"]["code"]) == (403, "permission_denied"), "it counts all tenants"


async def test_a_tokenizer_is_described(model, tmp_path):
    async with client_for(app_for(saying(model, "ok"), model)) as client:
        told = (await client.get("/tokenizer_info")).json()
    assert told["chat_template"] == model.tokenizer.chat_template
    assert told["model_max_length"] == model.max_model_len
    assert {"bos_token", "eos_token", "pad_token", "unk_token", "tokenizer_class"} <= set(told)
    metrics = Metrics()
    other = served_model(tmp_path, "other")
    fronts = [front_for(saying(one, "ok"), one, metrics) for one in (model, other)]
    async with client_for(two_models_app(*fronts, metrics)) as client:
        assert (await client.get("/tokenizer_info")).status_code == 400
        assert (await client.get("/tokenizer_info?model=other")).status_code == 200


async def test_the_page_of_the_document_runs_and_loads_nothing(model):
    async with client_for(app_for(saying(model, "ok"), model)) as client:
        page = await client.get("/docs")
        document = (await client.get("/openapi.json")).json()
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'none'" in page.headers["content-security-policy"]
    assert "<script" not in page.text
    assert not re.search(r'(src|href)="(?!openapi\.json)', page.text)
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page.text
    for name in document["components"]["schemas"]["ChatFields"]["properties"]:
        assert f"<code>{name}</code>" in page.text


@pytest.mark.parametrize("path", ["/score", "/rerank", "/v2/rerank"])
async def test_scores_and_ranks_go_by_all_their_names(model, path):
    body = {"query": "a", "documents": ["a b"]} if "rerank" in path else {"text_1": "a", "text_2": "a b"}
    answer = await post(Pools(), model, path, **body, truncate_prompt_tokens=1)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["total_tokens"] == 2


@pytest.mark.parametrize(("path", "words"), [("/pooling", "/v1/embeddings"), ("/v1/audio/speech", "text only")])
async def test_what_is_elsewhere_is_not_here_by_name(model, path, words):
    answer = await post(Pools(), model, path, input="a")
    assert answer.status_code == 404
    assert words in answer.json()["error"]["message"]


# POST routes that change something, and those that ask no model.
EFFECTS = {"/v1/files", "/v1/batches", "/sleep", "/wake_up", "/drain"}
WORDS = {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}


def test_every_route_outlives_its_router_and_is_traced(model):
    """Routes are known by their paths to the ingress, which repeats what has no effect, and to tracing."""
    app = app_for(saying(model, "ok"), model)
    posts = {one.path for one in app._app.routes if "POST" in (one.methods or ()) and "{" not in one.path} - EFFECTS
    assert "/invocations" in posts
    assert posts <= REPEATED
    assert posts - WORDS <= set(HTTP_OPERATIONS)
