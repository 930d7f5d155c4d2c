"""Two models behind one address: each call reaches its own, over HTTP and gRPC, and neither disturbs the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import grpc
import pytest

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.key_file import parse_keys
from cluster.admission.keys import FixedKeys, KeyRing
from cluster.admission.tenants import Tenancy
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.openai.served_model import ServedModel
from cluster.router.models import Models
from cluster.router.readiness import app_ready_body
from cluster.router.replica_set import ReplicaView
from cluster.telemetry.metrics import Metrics, ReplicaSetStats, ReplicaStats
from cluster.wire.parts import Load
from engine.errors import ConfigError
from engine.report import EngineStats
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.grpc_client import gathered, grpc_services, refusal_of, running_grpc
from tests.openai_app import client_for, front_for, saying, served_model, two_models_app

TEXTS = {"alpha": "the quick brown fox", "beta": "jumps over the lazy dog"}
KEYS = "- {key: sk-one, tenant: one, max_concurrent: 1}\n- {key: sk-two, tenant: two, tokens_per_minute: 40}\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, ServedModel]:
    """Different vocabularies: tokens of the one are other text to the other."""
    folder = tiny_tokenizer.save(tiny_tokenizer.byte_level(300), tmp_path_factory.mktemp("beta"))
    tokenizer = Tokenizer(str(folder))
    alpha = served_model(tmp_path_factory.mktemp("alpha"), "alpha", aliases=("first",))
    beta = ServedModel("beta", tokenizer, max_model_len=128, vocab_size=tokenizer.vocab_size, created=1)
    return {"alpha": alpha, "beta": beta}


class Both:
    """Both models, each with a source of its own that says its text."""

    def __init__(self, models, ready=None, bounds=None, **changes):
        ready = {"alpha": True, "beta": True} | (ready or {})
        bounds = {"alpha": 2**30, "beta": 2**30} | (bounds or {})
        self.metrics = Metrics()
        self.sources = {name: saying(model, TEXTS[name], **changes) for name, model in models.items()}
        self.gates = {name: AdmissionQueue(self.sources[name], lambda name=name: bounds[name]) for name in models}
        self.fronts = [
            front_for(
                self.sources[name],
                model,
                self.metrics,
                self.gates[name],
                figures=lambda name=name: ReplicaSetStats([ReplicaStats(f"{name}-1", EngineStats(num_running=1))]),
                ready=lambda name=name: ready[name],
                replicas=lambda name=name: [ReplicaView(f"{name}-1", 1, False, True, 1, 0.1, Load(3))],
            )
            for name, model in models.items()
        ]

    def app(self, **changes):
        return two_models_app(*self.fronts, self.metrics, **changes)

    @contextlib.asynccontextmanager
    async def grpc(self, tenancy=None):
        async with running_grpc(grpc_services(Models(self.fronts), self.metrics, tenancy), self.metrics) as served:
            yield served.stub


def chat(model, **more):
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}


def ask(model):
    return pb.GenerateRequest(model=model, prompt="lazy dog", sampling=pb.Sampling(max_tokens=60))


@pytest.mark.parametrize("name", ["alpha", "beta"])
async def test_each_call_is_tokenized_and_answered_by_the_model_it_names(models, name):
    both, model = Both(models), models[name]
    async with client_for(both.app()) as client:
        completion = await client.post(
            "/v1/completions", json={"model": name, "prompt": "lazy dog", "max_tokens": 60}
        )
        talked = await client.post("/v1/chat/completions", json=chat(name))
        response = await client.post("/v1/responses", json={"model": name, "input": "hi"})
        vectors = await client.post("/v1/embeddings", json={"model": name, "input": "lazy dog"})
        ids = await client.post("/tokenize", json={"model": name, "prompt": "lazy dog"})
        text = await client.post("/detokenize", json={"model": name, "tokens": ids.json()["tokens"]})
    assert completion.json()["choices"][0]["text"] == TEXTS[name]
    assert talked.json()["choices"][0]["message"]["content"] == TEXTS[name]
    assert response.json()["output"][0]["content"][0]["text"] == TEXTS[name]
    answers = (completion, talked, response, vectors)
    assert {answer.json()["model"] for answer in answers} == {name}
    assert ids.json()["tokens"] == model.tokenizer.encode("lazy dog")
    assert ids.json()["max_model_len"] == model.max_model_len
    assert "lazy dog" in text.json()["prompt"]
    source, other = both.sources[name], both.sources["beta" if name == "alpha" else "alpha"]
    assert source.requests[0].prompt_token_ids == tuple(model.tokenizer.encode("lazy dog"))
    assert len(source.requests) == 4
    assert not other.requests


def test_the_models_of_this_file_do_cut_texts_differently(models):
    alpha, beta = (models[name].tokenizer.encode("lazy dog") for name in TEXTS)
    assert alpha != beta


async def test_all_names_are_listed_and_an_alias_is_answered_by_its_models_own_name(models):
    async with client_for(Both(models).app()) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        one = (await client.get("/v1/models/first")).json()
        answer = await client.post("/v1/completions", json={"model": "first", "prompt": "x"})
    shown = [(card["id"], card["root"], card["max_model_len"]) for card in cards]
    assert shown == [("alpha", "alpha", 256), ("first", "alpha", 256), ("beta", "beta", 128)]
    assert (one["id"], one["root"]) == ("first", "alpha")
    assert answer.json()["model"] == "alpha"


POSTS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "gamma"}, 404, "model_not_found"),
        ({}, 400, "missing_required_parameter"),
        ({"model": None}, 400, "missing_required_parameter"),
    ],
)
async def test_another_model_or_none_is_refused_with_the_names_there_are(models, path, body, status, code):
    both = Both(models)
    async with client_for(both.app()) as client:
        answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, "model")
    assert all(name in error["message"] for name in ("alpha", "first", "beta"))
    assert error["request_id"]


@pytest.mark.parametrize("path", POSTS)
async def test_a_model_that_is_no_name_is_a_400(models, path):
    fields = {POSTS[0]: "prompt", POSTS[2]: "input", POSTS[3]: "input", POSTS[4]: "prompt"}
    given = {fields[path]: "x"} if path in fields else {}
    given |= {"messages": [{"role": "user", "content": "x"}]} if path == POSTS[1] else {}
    given |= {"tokens": [1]} if path == POSTS[5] else {}
    async with client_for(Both(models).app()) as client:
        answer = await client.post(path, json=given | {"model": 5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_one_model_need_not_be_named_where_it_need_not_today(models):
    metrics = Metrics()
    model = models["alpha"]
    served = Models([front_for(saying(model, "x"), model, metrics)])
    assert served.of({}).model_id == served.of({"model": None}).model_id == "alpha"
    with pytest.raises(ConfigError, match="two models are named 'alpha'"):
        Models([*served, *served])
    with pytest.raises(ConfigError, match="at least one"):
        Models([])


async def test_an_unknown_model_of_a_get_is_a_404_with_its_request_id(models):
    async with client_for(Both(models).app()) as client:
        for path in ("/v1/models/gamma", "/ready?model=gamma"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


async def test_ready_tells_of_each_model_and_a_dead_one_takes_none_with_it(models):
    dead = {"ready": False, "replicas": []}
    alive = {"ready": True, "cold": True, "replicas": [{"id": "r1", "phases": {}}]}
    body = app_ready_body([("alpha", dead), ("beta", alive)])
    assert body == {
        "ready": True,
        "models": {"alpha": False, "beta": True},
        "cold": ["beta"],
        "replicas": [{"id": "r1", "phases": {}, "model": "beta"}],
    }
    assert not app_ready_body([("alpha", dead), ("beta", dead)])["ready"]
    async with client_for(Both(models, ready={"alpha": False}).app(ready=lambda: body)) as client:
        whole = await client.get("/ready")
        of_beta = await client.get("/ready", params={"model": "beta"})
        of_alpha = await client.get("/ready", params={"model": "first"})
    assert (whole.status_code, of_beta.status_code, of_alpha.status_code) == (200, 200, 503)
    assert of_alpha.headers["retry-after"] == "1"
    assert (of_alpha.json()["models"], of_alpha.json()["replicas"]) == ({"alpha": False}, [])
    assert [replica["id"] for replica in of_beta.json()["replicas"]] == ["r1"]
    assert (of_alpha.json()["cold"], of_beta.json()["cold"]) == ([], ["beta"])


async def test_figures_are_labelled_by_the_model_that_was_asked(models):
    both = Both(models)
    async with client_for(both.app()) as client:
        for _ in range(2):
            await client.post("/v1/completions", json={"model": "first", "prompt": "x"})
        await client.post("/v1/completions", json={"model": "beta", "prompt": "x", "n": 999})
        await client.post("/v1/completions", json={"model": "gamma", "prompt": "x"})
        text = (await client.get("/metrics")).text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def answers(name: str, status: int) -> str | None:
        labels = f'model_name="{name}",route="/v1/completions",status="{status}"'
        return figures.get(f"squadron_http_responses_total{{{labels}}}")

    assert (answers("alpha", 200), answers("beta", 400), answers("", 404)) == ("2.0", "1.0", "1.0")
    assert figures['squadron_request_success_total{finished_reason="stop",model_name="alpha"}'] == "2.0"
    assert figures['squadron_request_success_total{finished_reason="stop",model_name="beta"}'] == "0.0"
    for name in TEXTS:
        assert figures[f'squadron_num_requests_running{{model_name="{name}",replica="{name}-1"}}'] == "1.0"
        assert figures[f'squadron_replicas{{model_name="{name}",state="ready"}}'] == "1.0"
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)), "a family is told twice"
    tenant = 'tenant="default"'
    assert figures[f'squadron_tenant_requests_total{{model_name="alpha",outcome="admitted",{tenant}}}'] == "2.0"
    assert figures[f'squadron_tenant_requests_total{{model_name="",outcome="admitted",{tenant}}}'] == "1.0"
    assert figures[f'squadron_tenant_prompt_tokens_total{{model_name="alpha",{tenant}}}'] == "2.0"


def tenancy() -> Tenancy:
    return Tenancy(FixedKeys(KeyRing(parse_keys(KEYS, "keys.yaml"))))


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


async def test_a_tenants_quotas_count_over_all_models(models):
    both = Both(models, hold=0)
    async with client_for(both.app(tenancy=tenancy())) as client:
        body = {"prompt": "x"}
        first = asyncio.create_task(
            client.post("/v1/completions", json=body | {"model": "alpha"}, headers=key("one"))
        )
        while not both.sources["alpha"].requests:
            await asyncio.sleep(0)
        second = await client.post("/v1/completions", json=body | {"model": "beta"}, headers=key("one"))
        for source in both.sources.values():
            source.go.set()
        assert (await first).status_code == 200
        long = {"prompt": "x " * 10, "max_tokens": 1}
        used = await client.post("/v1/completions", json=long | {"model": "alpha"}, headers=key("two"))
        over = await client.post("/v1/completions", json=long | {"model": "beta"}, headers=key("two"))
        text = (await client.get("/metrics", headers=key("two"))).text
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (used.status_code, over.status_code) == (200, 429)
    assert 'squadron_tenant_requests_total{model_name="beta",outcome="rate_limit_exceeded",tenant="two"} 1.0' in text


async def test_a_line_before_one_model_holds_up_nobody_who_asks_the_other(models):
    both = Both(models, bounds={"alpha": 1}, hold=0)
    async with client_for(both.app()) as client:
        waiting = [
            asyncio.create_task(client.post("/v1/completions", json={"model": "alpha", "prompt": "x"}))
            for _ in range(3)
        ]
        while both.gates["alpha"].num_waiting < 2:
            await asyncio.sleep(0)
        both.sources["beta"].go.set()
        answer = await client.post("/v1/completions", json={"model": "beta", "prompt": "x"})
        text = (await client.get("/metrics")).text
        both.sources["alpha"].go.set()
        assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}
    assert answer.status_code == 200
    assert 'squadron_tenant_requests_queued{model_name="alpha",tenant="default"} 2.0' in text
    assert 'squadron_tenant_requests_queued{model_name="beta",tenant="default"} 0.0' in text
    assert 'squadron_sequences_dispatched{model_name="alpha"} 1.0' in text


async def test_equal_prompts_of_two_models_and_tenants_have_salts_of_their_own_tenant(models):
    """Caches are the replicas', so models never share one; tenants of one model are told apart by their salts."""
    both = Both(models)
    async with client_for(both.app(tenancy=tenancy())) as client:
        for name in TEXTS:
            for tenant in ("one", "two"):
                body = {"model": name, "prompt": "x", "max_tokens": 1}
                assert (await client.post("/v1/completions", json=body, headers=key(tenant))).status_code == 200
    salts = {name: [request.cache_salt for request in source.requests] for name, source in both.sources.items()}
    assert all(one and two and one != two for one, two in salts.values())


async def test_grpc_calls_reach_the_model_they_name(models):
    both = Both(models)
    async with both.grpc() as stub:
        for name, model in models.items():
            told = await gathered(stub.Generate(ask(name)))
            talked = await gathered(
                stub.Chat(pb.ChatRequest(model=name, messages=[pb.Message(role="user", content="hi")]))
            )
            await stub.Embed(pb.EmbedRequest(model=name, texts=pb.Texts(texts=["lazy dog"])))
            info = await stub.GetModelInfo(pb.GetModelInfoRequest(model=name))
            load = await stub.GetLoad(pb.GetLoadRequest(model=name))
            assert told.text == talked.text == TEXTS[name]
            assert (info.model, info.vocab_size, info.max_model_len) == (name, model.vocab_size, model.max_model_len)
            assert [(one.replica_id, one.model) for one in load.replicas] == [(f"{name}-1", name)]
            assert len(both.sources[name].requests) == 3
        everything = await stub.GetLoad(pb.GetLoadRequest())
    assert [one.model for one in everything.replicas] == ["alpha", "beta"]
    text = both.metrics.render().decode()
    for name in TEXTS:
        assert f'squadron_grpc_responses_total{{method="Chat",model_name="{name}",status="OK"}} 1.0' in text


async def test_grpc_refuses_other_models_and_calls_without_one(models):
    async with Both(models).grpc() as stub:
        unknown = [
            stub.Generate(pb.GenerateRequest(model="gamma", prompt="x")),
            stub.Chat(pb.ChatRequest(model="gamma")),
            stub.Embed(pb.EmbedRequest(model="gamma")),
            stub.GetModelInfo(pb.GetModelInfoRequest(model="gamma")),
            stub.GetLoad(pb.GetLoadRequest(model="gamma")),
        ]
        for call in unknown:
            refusal = await refusal_of(call)
            assert (refusal.status, refusal.code) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
            assert "`alpha`, `first`, `beta`" in refusal.message
        for call in (stub.Generate(pb.GenerateRequest(prompt="x")), stub.GetModelInfo(pb.GetModelInfoRequest())):
            refusal = await refusal_of(call)
            assert (refusal.status, refusal.param) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
            assert "alpha, first, beta" in refusal.message


async def test_grpc_health_is_of_one_model_or_of_any_and_names_none_to_those_without_a_key(models):
    async with Both(models, ready={"beta": False}).grpc(tenancy()) as stub:
        assert (await stub.Health(pb.HealthRequest())).ready
        refusals = [await refusal_of(stub.Health(pb.HealthRequest(model=name))) for name in ("alpha", "gamma")]
    assert {one.status for one in refusals} == {grpc.StatusCode.UNAUTHENTICATED}
    assert "alpha" not in refusals[1].message
    async with Both(models, ready={"beta": False}).grpc() as stub:
        asked = {name: stub.Health(pb.HealthRequest(model=name)) for name in ("alpha", "first", "beta")}
        assert {name: (await call).ready for name, call in asked.items()} == {
            "alpha": True,
            "first": True,
            "beta": False,
        }
        assert (await refusal_of(stub.Health(pb.HealthRequest(model="gamma")))).status == grpc.StatusCode.NOT_FOUND


async def test_a_failing_model_leaves_the_other_ones_answers_whole(models):
    both = Both(models)
    both.sources["beta"].error = ConnectionError("dead")
    both.sources["beta"].hold = 0
    async with client_for(both.app()) as client:
        dead, alive = await asyncio.gather(
            client.post("/v1/completions", json={"model": "beta", "prompt": "x"}),
            client.post("/v1/completions", json={"model": "alpha", "prompt": "x"}),
        )
    assert (dead.status_code, alive.json()["choices"][0]["text"]) == (500, TEXTS["alpha"])


async def test_limits_and_parsers_are_those_of_the_model_that_is_asked(models):
    both = Both({name: dataclasses.replace(one, by_priority=name == "alpha") for name, one in models.items()})
    long = {"prompt": [5] * 200, "max_tokens": 1}
    async with client_for(both.app()) as client:
        fits = await client.post("/v1/completions", json=long | {"model": "alpha"})
        too_long = await client.post("/v1/completions", json=long | {"model": "beta"})
        priority = {"prompt": "x", "priority": 1}
        heeded = await client.post("/v1/completions", json=priority | {"model": "alpha"})
        refused = await client.post("/v1/completions", json=priority | {"model": "beta"})
    assert (fits.status_code, too_long.status_code) == (200, 400)
    assert "maximum context length is 128 tokens." in too_long.json()["error"]["message"]
    assert (heeded.status_code, refused.status_code) == (200, 400)
