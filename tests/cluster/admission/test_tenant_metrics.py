"""What each kind of key is shown: a tenant its own, an admin and a scraper everybody's."""

import subprocess
import sys
from dataclasses import asdict

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cluster.admission.key_file import keys_for, parse_keys
from cluster.admission.keys import FixedKeys, KeyRing
from cluster.admission.tenants import Tenancy
from cluster.app_config import parse_app
from cluster.config import NO_KEYS, parse_config
from cluster.http.gate import OPEN_PATHS, SCRAPED_PATHS
from cluster.telemetry.families import FAMILIES
from cluster.telemetry.metrics import Metrics, ReplicaSetStats, ReplicaStats, account_metrics
from cluster.wire.parts import ReplicaCosts, ResourceUsage
from deploy.cli.dry_run import describe_plans, make_plans
from deploy.cli.keys import own_key, with_key_file
from deploy.status import FOR_ADMINS, Condition, fetch, lines
from deploy.top.command import Watch
from deploy.top.view import lines as top_lines
from engine.errors import ConfigError
from engine.report import EngineStats
from tests.cluster.http.test_gate import routes_of
from tests.metric_families import at_routers
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

KEYS = """
- {key: sk-a, tenant: team-a}
- {key: sk-b, tenant: team-b}
- {key: sk-admin, tenant: operations, admin: true}
- {key: sk-scrape, tenant: prometheus, scrape: true}
"""
READY = {
    "ready": True,
    "router": "r-1",
    "version": "0.1",
    "models": {MODEL: True},
    "cold": [],
    "replicas": [{"id": "replica-1", "model": MODEL, "pids": [7]}],
    "states": [{"id": "replica-1", "state": "ready"}],
    "app": {"name": "squadron", "status": "RUNNING"},
    "deployments": {"Router": {"counts": {"RUNNING": 1}}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def costs_of_both():
    """The accounts of a replica that both tenants use."""
    tenants = {"team-a": ResourceUsage(1.25, 2.0), "team-b": ResourceUsage(3.75, 6.0)}
    grammars = {"team-a": 0.5, "team-b": 1.5}
    return account_metrics(
        MODEL, {"replica-1": ReplicaCosts(ResourceUsage(10.0, 16.0), ResourceUsage(5.0, 8.0), tenants, grammars)}
    )


class Accounts(Collector):
    def collect(self):
        return costs_of_both()


def app(model, ready=None, vllm=False):
    """Two tenants' worth of everything that a router shows."""
    metrics = Metrics(vllm=vllm)
    stats = EngineStats(num_running=3, kv_blocks_total=100, kv_blocks_free=50)
    figures = lambda: ReplicaSetStats([ReplicaStats("replica-1", stats)], 2)  # noqa: E731
    tenancy = Tenancy(FixedKeys(KeyRing(parse_keys(KEYS, "keys.yaml"))))
    built = app_for(
        saying(model, "ok"), model, metrics=metrics, tenancy=tenancy, figures=figures, ready=lambda: ready or READY
    )
    return built, metrics


async def used_by_both(client):
    for key, prompt in (("sk-a", "x"), ("sk-b", "a longer prompt of another tenant")):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 5}
        assert (await client.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200


def samples(text):
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


@pytest.mark.parametrize("vllm", [False, True])
async def test_metrics_show_a_tenant_what_bears_its_name_and_nothing_else(model, vllm):
    built, metrics = app(model, vllm=vllm)
    metrics.register(Accounts())
    async with client_for(built) as client:
        await used_by_both(client)
        texts = {
            key: (await client.get("/metrics", headers=bearer(key))).text
            for key in ("sk-a", "sk-b", "sk-admin", "sk-scrape")
        }
    whole = {(one.name, *sorted(one.labels.items())): one.value for one in samples(texts["sk-admin"])}
    for key, tenant, other in (("sk-a", "team-a", "team-b"), ("sk-b", "team-b", "team-a")):
        own = samples(texts[key])
        assert {one.labels["tenant"] for one in own} == {tenant}
        assert other not in texts[key] and "vllm:" not in texts[key]
        assert {one.name: one.value for one in own}["squadron_tenant_device_seconds_total"] == (
            1.25 if tenant == "team-a" else 3.75
        )
        assert all(whole[(one.name, *sorted(one.labels.items()))] == one.value for one in own)
        told = {one.name.removeprefix("squadron_").removesuffix("_total") for one in own}
        assert told == {name for name, family in FAMILIES.items() if "tenant" in family.labels and at_routers(family)}
    for key in ("sk-admin", "sk-scrape"):
        assert {one.labels.get("tenant") for one in samples(texts[key])} >= {None, "team-a", "team-b"}
        assert ("vllm:" in texts[key]) == vllm


async def test_a_tenant_that_has_not_called_is_shown_nothing(model):
    built, _ = app(model)
    async with client_for(built) as client:
        answer = await client.get("/metrics", headers=bearer("sk-b"))
    assert (answer.status_code, samples(answer.text)) == (200, [])


@pytest.mark.parametrize("path", ["/ready", f"/ready?model={MODEL}"])
@pytest.mark.parametrize("ready", [True, False])
async def test_ready_tells_tenants_whether_and_no_more(model, path, ready):
    built, _ = app(model, READY | {"ready": ready})
    async with client_for(built) as client:
        told = {key: await client.get(path, headers=bearer(key)) for key in ("sk-a", "sk-admin", "sk-scrape")}
    own = told["sk-a"].json()
    assert list(own) == ["ready"]
    assert told["sk-a"].status_code == (200 if own["ready"] else 503)
    assert own["ready"] is told["sk-admin"].json()["ready"]
    assert told["sk-admin"].json() == told["sk-scrape"].json()
    assert told["sk-admin"].json()["replicas"] == READY["replicas"]


async def test_ready_asks_tenants_for_models_that_are_there(model):
    built, _ = app(model)
    async with client_for(built) as client:
        answer = await client.get("/ready?model=none", headers=bearer("sk-a"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_key_for_scraping_opens_nothing_else(model):
    built, _ = app(model)
    async with client_for(built) as client:
        for method, path in routes_of(built):
            for spelt in (path, path + "/"):
                answer = await client.request(method, spelt, headers=bearer("sk-scrape"))
                assert (answer.status_code == 403) == (spelt not in SCRAPED_PATHS | OPEN_PATHS), (method, spelt)
                if answer.status_code == 403 and method != "HEAD":
                    error = answer.json()["error"]
                    assert (error["code"], error["type"]) == ("permission_denied", "permission_error")
                    assert "/metrics and /ready" in error["message"] and not error["retryable"]


async def test_the_only_key_of_a_server_is_an_admins(model):
    keys = keys_for("sk-one", None, "sk-figures")
    built = app_for(saying(model, "ok"), model, tenancy=Tenancy(keys), ready=lambda: READY)
    async with client_for(built) as client:
        for key in ("sk-one", "sk-figures"):
            assert (await client.get("/ready", headers=bearer(key))).json() == READY
            assert "squadron_replicas" in (await client.get("/metrics", headers=bearer(key))).text
        asked = [
            (await client.get("/v1/models", headers=bearer(key))).status_code for key in ("sk-one", "sk-figures")
        ]
    assert asked == [200, 403]


def test_flags_beside_a_key_file_are_admin_and_scraper_unless_the_file_lists_them(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("- {key: sk-both, tenant: team-a}")
    ring = keys_for("sk-flag", str(path), "sk-figures").ring
    assert [ring.tenant_of(key).sees_all for key in ("sk-flag", "sk-figures", "sk-both")] == [True, False, False]
    assert [ring.tenant_of(key).scrapes for key in ("sk-flag", "sk-figures", "sk-both")] == [False, True, False]
    assert not keys_for("sk-both", str(path)).ring.tenant_of("sk-both").sees_all
    assert keys_for(None, None, None) is None


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("- key: a\n  tenant: a\n  admin: true\n  scrape: true", 4, "scrape: true excludes admin: true"),
        ("- key: a\n  tenant: a\n  scrape: 1", 3, "scrape must be true or false"),
        ("- key: a\n  tenant: other", 2, "tenant must be another name than other"),
    ],
)
def test_key_files_that_say_too_much_are_refused(text, line, words):
    with pytest.raises(ConfigError, match=rf"keys\.yaml, line {line}: {words}"):
        parse_keys(text, "keys.yaml")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metrics_key": "m"}, "give --api-key or --api-key-file"),
        ({"metrics_key": "k", "api_key": "k"}, "must be a key of its own"),
        ({"metrics_key": " ", "api_key": "k"}, "is empty; leave it out"),
    ],
)
def test_a_metrics_key_without_sense_is_refused_by_its_name(settings, words):
    with pytest.raises(ConfigError, match=f"metrics_key: .*{words}") as wrong:
        parse_config({"model": "demo", **settings})
    assert wrong.value.flag == "metrics_key"


def test_who_needs_no_keys_gets_none():
    config = parse_config({"model": "demo", "api_key": "k", "api_key_file": "f", "metrics_key": "m"})
    assert not parse_config({**asdict(config), **NO_KEYS}).keyed
    keys = {name for name in asdict(config) if "_key" in name}
    assert keys == set(NO_KEYS)


def test_the_serve_command_looks_with_a_key_that_opens_nothing_else(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("- {key: sk-a, tenant: team-a}")
    made = with_key_file(parse_app({"model": "demo", "api_key_file": str(path)}), local=True).shared
    assert (made.api_key, made.keyed) == (None, True)
    ring = keys_for(made.api_key, made.api_key_file, made.metrics_key).ring
    assert ring.tenant_of(own_key(made)).scrapes
    chosen = with_key_file(
        parse_app({"model": "demo", "api_key_file": str(path), "metrics_key": "sk-m"}), local=True
    ).shared
    assert own_key(chosen) == "sk-m"
    assert own_key(parse_config({"model": "demo", "api_key": "sk-one"})) == "sk-one"
    assert own_key(parse_config({"model": "demo"})) is None


def test_a_dry_run_shows_no_key_and_is_a_file_that_can_be_used():
    app = parse_app({"model": "demo", "device": "cpu", "api_key": "secret-1", "metrics_key": "secret-2"})
    text = describe_plans(app, make_plans(app))
    assert "secret" not in text
    assert parse_app(yaml.safe_load(text)).shared.keyed


def squadron(*args):
    code = "from deploy.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_makes_keys_for_scraping():
    made = squadron("keys", "new", "--tenant", "prometheus", "--scrape")
    assert KeyRing(parse_keys(made.stdout, "keys.yaml")).tenant_of(made.stderr.split()[-1]).scrapes
    both = squadron("keys", "new", "--tenant", "prometheus", "--scrape", "--admin")
    assert (both.returncode, both.stdout) == (1, "")
    assert both.stderr.startswith("Error: --admin and --scrape exclude each other")


def test_status_and_top_say_which_key_they_need():
    own = 'squadron_tenant_requests_total{model_name="demo",outcome="admitted",tenant="team-a"} 4.0\n'

    def answer(request):
        return (
            httpx.Response(200, json={"ready": True})
            if request.url.path == "/ready"
            else httpx.Response(200, text=own)
        )

    with httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer)) as client:
        report = fetch(client)
        watch = Watch(client, 1.0)
        watch.poll()
        picture = watch.poll()
    assert (report.condition, report.notice) == (Condition.READY, FOR_ADMINS)
    assert lines(report) == [f'ready http://test notice="{FOR_ADMINS}"']
    assert FOR_ADMINS in top_lines(picture)[0]
    assert len(top_lines(picture)) == 1, "rates of counters that may be of two routers"
