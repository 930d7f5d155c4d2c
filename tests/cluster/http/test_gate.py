"""The door of the HTTP front end: keys on every route, limits as OpenAI tells them, tenants apart."""

import asyncio
import logging
from base64 import b64encode

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.capacity import UNBOUNDED
from cluster.admission.key_file import parse_keys
from cluster.admission.keys import OPEN, FixedKeys, KeyRing, Tenant
from cluster.admission.tenants import Tenancy, tenant_salt
from cluster.client_id import SERVERS_NAME
from cluster.http.gate import OPEN_PATHS, Gate, duration
from cluster.token_source import TokenChunk
from engine.config import EngineConfig
from engine.core import EngineCore
from tests.fake_executor import FakeExecutor
from tests.openai_app import MODEL, app_for, client_for, saying, served_model, serving

KEYS = """
- {key: sk-free, tenant: free}
- {key: sk-few, tenant: few, requests_per_minute: 2, tokens_per_minute: 20, max_concurrent: 1}
- {key: sk-admin, tenant: operations, admin: true}
- {key: sk-old, tenant: free, expires: 2001-01-01T00:00:00Z}
"""
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


def tenancy_for():
    return Tenancy(FixedKeys(KeyRing(parse_keys(KEYS, "keys.yaml"))))


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def routes_of(app: Gate):
    inner = app._app
    assert isinstance(inner, Starlette)
    routes = [route for route in inner.routes if isinstance(route, Route)]
    assert len(routes) == len(inner.routes), "a kind of route that this test does not know"
    return [(method, route.path) for route in routes for method in route.methods or ("GET", "POST")]


async def ask(client, key, **changes):
    return await client.post("/v1/completions", json=BODY | changes, headers=bearer(key))


@pytest.mark.parametrize("headers", [{}, bearer("sk-wrong"), bearer("sk-old"), {"x-api-key": "sk-wrong"}])
async def test_every_route_but_health_refuses_who_has_no_key(model, headers):
    source = saying(model, "ok")
    app = app_for(source, model, tenancy=tenancy_for())
    routes = routes_of(app)
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/ready"} <= {p for _, p in routes}
    async with client_for(app) as client:
        for method, path in routes:
            for spelt in (path.replace("{name:path}", "demo"), path + "/", "/" + path):
                answer = await client.request(method, f"http://localhost{spelt}", headers=headers)
                assert (answer.status_code == 401) == (spelt not in OPEN_PATHS), (method, spelt)
    assert not source.requests
    assert sorted(OPEN_PATHS) == ["/health", "/ping"]


ASKED = {"origin": "https://page.example", "access-control-request-method": "POST"}


async def test_pages_of_other_sites_may_use_a_server_with_keys(model):
    source = saying(model, "ok")
    async with client_for(app_for(source, model, tenancy=tenancy_for())) as client:
        allowed = await client.options("/v1/completions", headers=ASKED)
        headers = {"origin": "https://page.example", **bearer("sk-free")}
        answered = await client.post("/v1/completions", json=BODY, headers=headers)
        refused = await client.post("/v1/completions", json=BODY, headers=headers | bearer("sk-wrong"))
        plain = await ask(client, "sk-free")
    assert allowed.status_code == 204
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert (answered.status_code, refused.status_code) == (200, 401)
    assert {one.headers["access-control-allow-origin"] for one in (allowed, answered, refused)} == {"*"}
    assert "access-control-allow-credentials" not in answered.headers
    assert "access-control-allow-origin" not in plain.headers


async def test_pages_of_other_sites_are_refused_where_there_are_no_keys(model):
    async with client_for(app_for(saying(model, "ok"), model)) as client:
        refused = await client.options("/v1/completions", headers=ASKED)
        bare = await client.options("/v1/completions")
        read = await client.get("/v1/models", headers={"origin": "https://page.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden_origin")
    assert "--api-key" in refused.json()["error"]["message"]
    assert bare.status_code == 405
    assert not any("access-control-allow-origin" in one.headers for one in (refused, bare, read))


async def test_where_the_carrier_names_answers_the_guard_is_told_the_id_of_the_body(model):
    async with client_for(app_for(saying(model, "ok"), model, names_answers=False)) as client:
        served = {"x-request-id": "made-by-serve"}
        answer = await client.post("/v1/completions", json=BODY, headers=served)
        refused = await client.post("/v1/completions", json=BODY | {"n": 0}, headers=served)
    assert answer.headers[SERVERS_NAME] == answer.json()["id"]
    assert refused.headers[SERVERS_NAME] == refused.json()["error"]["request_id"]
    assert "x-request-id" not in answer.headers


def basic(key, **headers):
    return {"authorization": "Basic " + b64encode(f"me:{key}".encode()).decode(), **headers}


async def test_a_browser_may_send_the_key_its_own_way_to_the_page_and_from_it_only(model):
    source = saying(model, "ok")
    same, other = {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "cross-site"}
    async with client_for(app_for(source, model, tenancy=tenancy_for())) as client:
        door = await client.get("/ui")
        assert door.status_code == 401
        assert door.headers["www-authenticate"].startswith("Basic ")
        assert "www-authenticate" not in (await client.get("/v1/models")).headers
        asked = [("/ui", basic("sk-free")), ("/ui", basic("sk-free", **other)), ("/ui", basic("sk-wrong"))]
        asked += [("/v1/models", basic("sk-free", **given)) for given in (same, other, {})]
        asked += [("/v1/models", {"authorization": "Basic \u00ff".encode("latin-1"), **same})]
        answers = [(await client.get(path, headers=headers)).status_code for path, headers in asked]
    assert answers == [200, 200, 401, 200, 401, 401, 401]


async def test_an_expired_key_is_told_so(model):
    source = saying(model, "ok")
    async with client_for(app_for(source, model, tenancy=tenancy_for())) as client:
        answer = await ask(client, "sk-old")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "expired at 2001-01-01" in answer.json()["error"]["message"]


async def test_limits_are_told_as_openai_tells_them(model):
    source = saying(model, "four")
    async with client_for(app_for(source, model, tenancy=tenancy_for())) as client:
        first = await ask(client, "sk-few")
        second = await ask(client, "sk-few")
        refused = await ask(client, "sk-few")
        other = await ask(client, "sk-free")
    used = first.json()["usage"]["total_tokens"]
    told = {name: value for name, value in first.headers.items() if name.startswith("x-ratelimit")}
    assert told.pop("x-ratelimit-reset-requests").endswith("s")
    assert told.pop("x-ratelimit-reset-tokens").endswith("s")
    assert told == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-limit-tokens": "20",
        "x-ratelimit-remaining-tokens": str(20 - first.json()["usage"]["prompt_tokens"]),
    }
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert left == 20 - used - second.json()["usage"]["prompt_tokens"], "the whole first answer was charged"
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["code"], error["type"], error["retryable"]) == ("rate_limit_exceeded", "rate_limit_error", True)
    assert error["request_id"] == refused.headers["x-request-id"]
    assert not any(name.startswith("x-ratelimit") for name in other.headers)


async def test_a_prompt_that_never_fits_is_refused_for_good(model):
    source = saying(model, "ok")
    async with client_for(app_for(source, model, tenancy=tenancy_for())) as client:
        answer = await ask(client, "sk-few", prompt="x" * 50)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "prompt_exceeds_quota")
    assert "20 tokens per minute" in answer.json()["error"]["message"]
    assert not source.requests


async def test_a_place_is_free_again_after_every_kind_of_end(model):
    source = saying(model, "hello", hold=1)
    admission = AdmissionQueue(source, lambda: UNBOUNDED)
    keys = parse_keys("- {key: sk-one, tenant: one, max_concurrent: 1}", "keys.yaml")
    tenancy = Tenancy(FixedKeys(KeyRing(keys)))
    async with (
        serving(app_for(source, model, tenancy=tenancy, admission=admission)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-one", max_retries=0) as client,
    ):
        stream = await client.completions.create(**BODY, stream=True)
        await anext(aiter(stream))
        with pytest.raises(openai.RateLimitError, match="1 requests at a time"):
            await client.completions.create(**BODY)
        await stream.close()
        while tenancy.quotas.running(keys[0].tenant):
            await asyncio.sleep(0.005)
        assert admission.num_inside == 0
        source.go.set()
        await client.completions.create(**BODY)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**BODY | {"max_tokens": -1})
        await client.completions.create(**BODY)
    assert tenancy.quotas.running(keys[0].tenant) == 0
    assert tenancy.counts[MODEL, "one"].requests == {"admitted": 4}
    assert tenancy.counts["", "one"].requests == {"rate_limit_exceeded": 1}


async def test_a_line_that_is_full_or_a_source_that_fails_reads_the_same_over_http(model):
    source = saying(model, "hello", hold=0)
    admission = AdmissionQueue(source, lambda: 1)
    async with client_for(app_for(source, model, tenancy=tenancy_for(), admission=admission)) as client:
        tasks = [asyncio.create_task(ask(client, "sk-free")) for _ in range(5)]
        while admission.waiting() != {"free": 4}:
            await asyncio.sleep(0.005)
        source.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 5
    assert (admission.num_inside, admission.num_waiting) == (0, 0)


async def test_metrics_and_logs_name_the_tenant_and_never_the_key(model, caplog):
    source = saying(model, "ok")
    with caplog.at_level(logging.DEBUG):
        async with client_for(app_for(source, model, tenancy=tenancy_for())) as client:
            for _ in range(3):
                await ask(client, "sk-few")
            await ask(client, "sk-unknown")
            text = (await client.get("/metrics", headers=bearer("sk-admin"))).text
    lines = [line for line in text.splitlines() if line.startswith("squadron_tenant")]
    assert f'squadron_tenant_requests_total{{model_name="{MODEL}",outcome="admitted",tenant="few"}} 2.0' in lines
    assert (
        f'squadron_tenant_requests_total{{model_name="{MODEL}",outcome="rate_limit_exceeded",tenant="few"}} 1.0'
        in lines
    )
    assert f'squadron_tenant_requests_shed_total{{model_name="{MODEL}",tenant="few"}} 0.0' in lines
    assert f'squadron_tenant_requests_queued{{model_name="{MODEL}",tenant="few"}} 0.0' in lines
    tokens = next(line for line in lines if line.startswith("squadron_tenant_generation_tokens_total"))
    assert float(tokens.split()[-1]) == 6.0
    assert "tenant few: refused at the door: rate_limit_exceeded" in caplog.text
    assert "sk-" not in caplog.text + text


@pytest.mark.parametrize(
    ("seconds", "spelt"),
    [(0, "0s"), (0.0004, "1ms"), (0.02, "20ms"), (1, "1s"), (7.655, "7.66s"), (60, "1m0s"), (119.999, "2m0s")],
)
def test_times_are_written_as_openai_writes_them(seconds, spelt):
    assert duration(seconds) == spelt


# --- the prefix cache


class EngineSource:
    """The engine itself, on the fake executor, as a token source: one request after the other."""

    def __init__(self, vocab_size):
        config = EngineConfig("fake", max_model_len=256, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
        self.core = EngineCore(config, FakeExecutor(256, 4, vocab_size), (0,), vocab_size, 256)

    @property
    def hits(self):
        """Prompt tokens that were found in the prefix cache, ever."""
        return self.core.stats().prefix_hit_tokens

    async def generate(self, request, context=None):
        self.core.add(request)
        while self.core.has_unfinished:
            report = self.core.step()
            ends = {finish.sequence.index: finish.reason.value for finish in report.finished}
            for row, (sequence, token) in enumerate(zip(report.sequences, report.token_ids, strict=True)):
                reason = ends.get(sequence.index) if row == len(report.sequences) - 1 else None
                yield TokenChunk(sequence.index, (token,), (), reason, sequence.num_cached_tokens)

    def finish_choice(self, request_id, choice):
        raise AssertionError("no stop strings here")


async def test_tenants_never_share_a_cached_block_whatever_salt_they_send(model):
    source = EngineSource(model.vocab_size)
    text = "the same long prompt of everybody here"
    both = KeyRing(
        parse_keys("- {key: sk-a, tenant: a}\n- {key: sk-a2, tenant: a}\n- {key: sk-b, tenant: b}", "keys")
    )
    app = app_for(source, model, tenancy=Tenancy(FixedKeys(both)))
    stolen = tenant_salt(Tenant("a"), b"mine")
    salts = [None, "", "mine", "a", "b", stolen.hex(), stolen.decode("latin-1"), "default"]
    async with client_for(app) as client:

        async def hits(key, salt):
            before = source.hits
            sent = {} if salt is None else {"cache_salt": salt}
            answer = await ask(client, key, prompt=text, max_tokens=1, temperature=0, **sent)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == source.hits - before
            return source.hits - before

        assert [await hits("sk-a", salt) for salt in (None, "mine")] == [0, 0]
        assert [await hits("sk-b", salt) > 0 for salt in salts] == [False, True, *[False] * 6], "only its own"
        assert await hits("sk-a2", None) > 0, "keys of one tenant share"
        assert await hits("sk-a", "mine") > 0


async def test_a_server_without_keys_keeps_the_clients_salts(model):
    source = EngineSource(model.vocab_size)
    text = "the same long prompt of everybody here"
    async with client_for(app_for(source, model)) as client:
        found = []
        for salt in (None, None, "x", "x", "y"):
            sent = {} if salt is None else {"cache_salt": salt}
            answer = await client.post("/v1/completions", json=BODY | {"prompt": text, "max_tokens": 1} | sent)
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert found == [False, True, False, True, False]


@given(st.text(max_size=20), st.text(max_size=20), st.binary(max_size=40), st.binary(max_size=40))
def test_salts_differ_where_tenant_or_salt_do(one, other, salt, another):
    same = (one, salt) == (other, another)
    assert (tenant_salt(Tenant(one), salt) == tenant_salt(Tenant(other), another)) == same
    assert len(tenant_salt(Tenant(one), salt)) == 32
    assert tenant_salt(OPEN, salt) == salt


async def test_a_route_that_fails_answers_with_a_typed_error(model):
    app = app_for(saying(model, "ok"), model, ready=lambda: {}["no such figure"])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/ready")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (500, "internal_error", "server_error")
    assert answer.headers["x-request-id"] == error["request_id"]
    assert "no such figure" not in answer.text
