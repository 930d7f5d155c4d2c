"""`squadron top`: what it shows of an app, from what its routers say of themselves."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    enable_created_metrics,
    generate_latest,
)
from rich.console import Console

from cluster.telemetry.families import FAMILIES, Kind
from cluster.telemetry.metrics import Metrics
from deploy.status import Condition
from deploy.top.command import Top, Watch, show_top
from deploy.top.picture import ITL, NAMES, TPOT, TTFT, Percentiles, make_picture, percentiles, quantile
from deploy.top.scrape import STARTED, Window, read_scrape
from deploy.top.view import lines, screen
from tests.metric_families import at_routers

ADDRESS = "http://127.0.0.1:8000"
STATES = [
    {"id": "aaaa1111", "state": "ready", "model": "demo", "running": 12, "waiting": 4, "kv_usage": 0.42},
    {"id": "bbbb2222", "state": "stalled", "model": "demo", "running": 2, "waiting": 0, "kv_usage": 0.1},
    {"state": "pending", "model": "demo"},
]
# What one router says of replicas and tenants; `{n}` is how often it was asked.
RECORDED = """\
# TYPE squadron_requests_ended counter
squadron_requests_ended_total{{model_name="demo",outcome="completed"}} {ended}
squadron_requests_ended_total{{model_name="demo",outcome="aborted"}} {n}
squadron_requests_ended_total{{model_name="demo",outcome="overloaded"}} {n}
# TYPE squadron_requests_live gauge
squadron_requests_live{{model_name="demo"}} 7
# TYPE squadron_migrations counter
squadron_migrations_total{{model_name="demo"}} {n}
# TYPE squadron_engine_prompt_tokens counter
squadron_engine_prompt_tokens_total{{model_name="demo",replica="aaaa1111"}} {engine}
# TYPE squadron_engine_generation_tokens counter
squadron_engine_generation_tokens_total{{model_name="demo",replica="aaaa1111"}} {engine}
# TYPE squadron_num_preemptions counter
squadron_num_preemptions_total{{model_name="demo",replica="aaaa1111"}} {n}
# TYPE squadron_prefix_cache_queries counter
squadron_prefix_cache_queries_total{{model_name="demo",replica="aaaa1111"}} {engine}
# TYPE squadron_prefix_cache_hits counter
squadron_prefix_cache_hits_total{{model_name="demo",replica="aaaa1111"}} {hits}
# TYPE squadron_tenant_device_seconds counter
squadron_tenant_device_seconds_total{{model_name="demo",replica="aaaa1111",tenant="team-a"}} {n}
# TYPE squadron_idle_device_seconds counter
squadron_idle_device_seconds_total{{model_name="demo",replica="aaaa1111"}} {n}
# TYPE squadron_tenant_requests counter
squadron_tenant_requests_total{{model_name="demo",tenant="team-a",outcome="admitted"}} {ended}
squadron_tenant_requests_total{{model_name="demo",tenant="team-b",outcome="rate_limit_exceeded"}} {n}
# TYPE squadron_tenant_requests_queued gauge
squadron_tenant_requests_queued{{model_name="demo",tenant="team-a"}} 3
# TYPE squadron_tenant_prompt_tokens counter
squadron_tenant_prompt_tokens_total{{model_name="demo",tenant="team-a"}} {engine}
# TYPE squadron_tenant_generation_tokens counter
squadron_tenant_generation_tokens_total{{model_name="demo",tenant="team-a"}} {engine}
"""


class FakeRouter:
    """What a router counts and times by itself, beside what is recorded."""

    def __init__(self, clock) -> None:
        self.clock = clock
        self.looks = 0
        self.registry = CollectorRegistry()
        self.prompt, self.output = (self._made(Counter, name) for name in ("prompt_tokens", "generation_tokens"))
        started = Gauge(f"squadron_{STARTED}", "text", ["model_name"], registry=self.registry)
        started.labels(model_name="demo").set(time.time())
        names = (TTFT, ITL, TPOT)
        self.ttft, self.itl, self.tpot = (self._made(Histogram, name.removesuffix("_bucket")) for name in names)

    def _made(self, kind, name: str):
        buckets = {"buckets": FAMILIES[name].buckets} if kind is Histogram else {}
        family = kind(f"squadron_{name}", "text", ["model_name"], registry=self.registry, **buckets)
        return family.labels(model_name="demo")

    def serve(self, tokens: int) -> None:
        """One request of ten prompt tokens: the first after 0.1 s, each other after 0.01 s."""
        self.prompt.inc(10)
        self.output.inc(tokens)
        self.ttft.observe(0.1)
        for _ in range(tokens - 1):
            self.itl.observe(0.01)
        self.tpot.observe(0.01)

    def text(self) -> str:
        self.looks += 1
        n = self.looks
        recorded = RECORDED.format(n=n, ended=4 * n, engine=200 * n, hits=150 * n)
        return generate_latest(self.registry).decode() + recorded


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def read(self) -> float:
        return self.now


class FakeApp:
    """Routers behind something that lets the next one answer each time."""

    def __init__(self, routers: int = 1) -> None:
        self.clock = Clock()
        self.routers = [FakeRouter(self.clock) for _ in range(routers)]
        self.asked = 0
        self.up = True

    def answer(self, request: httpx.Request) -> httpx.Response:
        if not self.up:
            raise httpx.ConnectError("connection refused")
        if request.url.path == "/ready":
            running = {"status": "HEALTHY", "counts": {"RUNNING": len(self.routers)}}
            body = {"ready": True, "models": {"demo": True}, "states": STATES, "deployments": {"Router": running}}
            return httpx.Response(200, json=body)
        self.asked += 1
        return httpx.Response(200, text=self.routers[self.asked % len(self.routers)].text())

    def watch(self, interval: float = 2.0) -> Watch:
        client = httpx.Client(base_url=ADDRESS, transport=httpx.MockTransport(self.answer))
        return Watch(client, interval, self.clock.read)

    def second_look(self):
        """A picture of the two seconds in which every router served a request of eleven tokens."""
        watch = self.watch()
        watch.poll()
        for router in self.routers:
            router.serve(11)
        self.clock.now += 2.0
        return watch.poll()


def test_all_that_is_read_is_shown_by_routers() -> None:
    shown = {}
    assert at_routers(FAMILIES[STARTED])
    for family in FAMILIES.values():
        ending = "_bucket" if family.kind is Kind.HISTOGRAM else ""
        shown[family.shown_name.removeprefix("squadron_") + ending] = at_routers(family)
    assert [name for name in NAMES if not shown.get(name)] == []


@pytest.mark.parametrize("created", [True, False])
def test_two_routers_can_be_told_apart_with_and_without_times_of_counters(created) -> None:
    """PROMETHEUS_DISABLE_CREATED_SERIES leaves out the series `_created`."""
    (enable_created_metrics if created else disable_created_metrics)()
    try:
        routers = [Metrics() for _ in range(3)]
        for metrics in routers:
            metrics.of("demo")
            metrics.of("other")
        texts = [metrics.render().decode() for metrics in routers]
    finally:
        enable_created_metrics()
    assert all(("_created{" in text) == created for text in texts)
    found = [read_scrape(text, 0.0).router for text in texts]
    assert len({*found}) == 3
    assert 0.0 not in found


def test_rates_and_percentiles_are_those_between_two_looks() -> None:
    picture = FakeApp().second_look()
    (model,) = picture.models
    assert picture.seconds == pytest.approx(2.0)
    assert (model.prompt_tokens, model.generation_tokens) == (pytest.approx(5.0), pytest.approx(5.5))
    assert (model.requests, model.failed, model.refused) == (pytest.approx(2.0), pytest.approx(0.5), 0.5)
    assert (model.live, model.queued, model.moved) == (7, 3, 1)
    assert model.cache_hits == pytest.approx(0.75)
    assert 0.08 <= model.ttft.p50 <= 0.1
    assert 0.005 <= model.itl.p50 <= model.itl.p99 <= 0.025
    assert 0.005 <= model.tpot.p50 <= 0.025


def test_all_routers_are_met_and_each_is_compared_with_itself() -> None:
    app = FakeApp(routers=3)
    picture = app.second_look()
    assert picture.heard == 3
    (model,) = picture.models
    assert model.generation_tokens == pytest.approx(16.5)
    assert model.live == 21
    # Of replicas all routers say the same, which counts once.
    assert picture.replicas[0].generation_tokens == pytest.approx(100.0)
    assert sum(tenant.devices for tenant in picture.tenants) == pytest.approx(1.0)


def test_a_router_that_hides_for_one_look_keeps_its_last_figures() -> None:
    app = FakeApp(routers=2)
    watch = app.watch()
    watch.poll()
    app.clock.now += 2.0
    assert watch.poll().heard == 2
    first = app.routers[0]
    app.routers = [first, first]
    app.clock.now += 2.0
    assert watch.poll().heard == 2
    app.clock.now += 31.0
    assert watch.poll().heard == 1


def test_a_router_that_began_anew_gives_no_rates_below_zero() -> None:
    app = FakeApp()
    watch = app.watch()
    app.routers[0].serve(50)
    watch.poll()
    app.routers = [FakeRouter(app.clock)]
    app.clock.now += 2.0
    watch.poll()
    app.clock.now += 2.0
    (model,) = watch.poll().models
    assert model.generation_tokens == 0
    assert model.ttft is None


def test_a_replica_that_a_router_meets_brings_no_burst_of_all_its_life() -> None:
    """At a scale-up, and where a link that was lost is made anew."""
    old = read_scrape(RECORDED.format(n=1, ended=1, engine=1, hits=1), 0.0)
    met = """\
# TYPE squadron_idle_device_seconds counter
squadron_idle_device_seconds_total{model_name="demo",replica="aaaa1111"} 3
squadron_idle_device_seconds_total{model_name="demo",replica="cccc3333"} 5000
# TYPE squadron_tenant_device_seconds counter
squadron_tenant_device_seconds_total{model_name="demo",replica="aaaa1111",tenant="team-b"} 2
squadron_tenant_device_seconds_total{model_name="demo",replica="cccc3333",tenant="team-b"} 7000
"""
    window = Window(old, read_scrape(met, 2.0))
    assert window.rate("idle_device_seconds_total") == pytest.approx(1.0)
    assert window.rate("tenant_device_seconds_total") == pytest.approx(1.0), "of a new tenant on a known replica"


def test_before_the_second_look_only_states_are_known() -> None:
    picture = FakeApp().watch().poll()
    assert picture.seconds is None
    assert picture.models == ()
    assert [replica.line.state for replica in picture.replicas] == ["ready", "stalled", "pending"]
    assert "first look" in shown(picture)


def shown(picture, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(screen(picture))
    return out.getvalue()


def test_a_terminal_of_eighty_columns_shows_all_of_it() -> None:
    text = shown(FakeApp().second_look())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for words in ("READY", "the last 2.0 s", "1 ready", "1 stalled", "1 pending", "1 moved", "7 live, 3 queued"):
        assert words in text
    for words in ("2.0/s", "0.50/s failed", "0.50/s refused", "75% of prompts", "TTFT", "aaaa1111", "42%"):
        assert words in text
    for words in ("team-a", "team-b", "(idle)", "0.50", "1 preempted"):
        assert words in text


def test_without_a_terminal_everything_is_a_line_of_names_and_values() -> None:
    app, model, *rest = lines(FakeApp().second_look())
    assert app == f"ready {ADDRESS} seconds=2.0 routers=1 heard=1"
    assert model.startswith(
        "model demo requests=2.00/s failed=0.50/s refused=0.50/s in=5.0/s out=5.5/s live=7 queued=3"
    )
    assert " ttft=" in model
    assert (
        rest[0] == "replica aaaa1111 ready model=demo running=12 waiting=4 kv=42% in=100.0/s out=100.0/s preempted=1"
    )
    assert rest[3:] == [
        "tenant team-a requests=2.00/s refused=0.00/s in=100.0/s out=100.0/s queued=3 devices=0.50",
        "tenant team-b requests=0.50/s refused=0.50/s in=0.0/s out=0.0/s queued=0 devices=0.00",
        "idle devices=0.50",
    ]


class Sleeper:
    """Instead of waiting: moves the clock, and presses Ctrl-C after `looks` of it."""

    def __init__(self, app: FakeApp, looks: int) -> None:
        self.app, self.left = app, looks

    def __call__(self, seconds: float) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.app.clock.now += seconds


def test_once_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeApp()
    assert Top(app.watch(), Console(), 2.0, True, Sleeper(app, 1)).run(once=True) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["report"]["condition"] == "ready"
    assert body["seconds"] == pytest.approx(2.0)
    assert body["models"][0]["requests"] == pytest.approx(2.0)
    assert body["tenants"][-1]["tenant"] == ""


def test_ctrl_c_ends_it_with_the_state_of_the_app(capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeApp()
    assert Top(app.watch(), Console(), 2.0, False, Sleeper(app, 3)).run(once=False) == 0
    assert sum(line.startswith("model demo") for line in capsys.readouterr().out.splitlines()) == 3


def test_on_a_terminal_the_screen_is_given_back_after_ctrl_c() -> None:
    app, out = FakeApp(), io.StringIO()
    console = Console(file=out, width=80, height=40, force_terminal=True)
    assert Top(app.watch(), console, 2.0, False, Sleeper(app, 2)).run(once=False) == 0
    assert "team-a" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h\x1b[?1049l"), "the cursor is shown, the other screen left"


@pytest.fixture
def listening():
    """A fake app that really listens; yields its address."""
    app = FakeApp()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = app.answer(httpx.Request("GET", f"{ADDRESS}{self.path}"))
            self.send_response(answer.status_code)
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_command_ends_at_ctrl_c_without_a_word(listening: str) -> None:
    command = [
        sys.executable,
        "-c",
        "from deploy.main import main; main()",
        "top",
        "--url",
        listening,
        "--interval",
        "0.2",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        seen = [process.stdout.readline() for _ in range(8)]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said == ""
    assert any(line.startswith("model demo requests=") for line in seen)


def test_an_app_that_goes_is_shown_as_gone_and_seen_again() -> None:
    app = FakeApp()
    watch = app.watch()
    watch.poll()
    app.up = False
    gone = watch.poll()
    assert gone.report.condition is Condition.UNREACHABLE
    assert gone.models == ()
    assert "UNREACHABLE" in shown(gone)
    app.up = True
    app.clock.now += 2.0
    assert watch.poll().seconds is None
    app.clock.now += 2.0
    assert watch.poll().seconds == pytest.approx(2.0)


@pytest.mark.parametrize("routers", [1, 2])
def test_a_page_in_the_place_of_figures_is_passed_over(routers: int) -> None:
    app = FakeApp(routers)
    watch = app.watch()
    watch.poll()
    told = app.routers[0].text
    app.routers[0].text = lambda: "<html><body>503 Service Unavailable</body></html>"
    app.clock.now += 2.0
    assert watch.poll().report.condition is Condition.READY
    app.routers[0].text = told
    app.clock.now += 2.0
    assert watch.poll().seconds == pytest.approx(4.0)


def test_nobody_there_is_exit_code_2_at_once_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_top("127.0.0.1:1", None, interval=2.0, once=False, as_json=False) == 2
    assert "or give its --url" in capsys.readouterr().out


def test_a_wrong_key_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    refusing = httpx.MockTransport(lambda _: httpx.Response(401, json={"error": {}}))
    with httpx.Client(base_url=ADDRESS, transport=refusing) as client:
        assert Top(Watch(client, 2.0), Console(), 2.0, False).run(once=False) == 3
    out = capsys.readouterr().out
    assert out.startswith("key-refused")
    assert "refuses the API key" in out


def test_it_needs_no_ray() -> None:
    code = "import sys; sys.modules['ray'] = sys.modules['torch'] = None; from deploy.main import main; main()"
    command = [sys.executable, "-c", code, "top", "--url", "127.0.0.1:1", "--once"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stdout.startswith("unreachable")


def test_a_percentile_lies_evenly_in_its_bucket() -> None:
    buckets = {"0.1": 50.0, "0.2": 100.0, "+Inf": 100.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.1)
    assert quantile(buckets, 0.75) == pytest.approx(0.15)
    assert percentiles(buckets) == Percentiles(pytest.approx(0.1), pytest.approx(0.19), pytest.approx(0.198))


def test_what_lies_above_all_bounds_counts_as_the_last_one() -> None:
    assert quantile({"0.1": 1.0, "+Inf": 100.0}, 0.99) == 0.1
    assert quantile({"0.1": 0.0, "+Inf": 0.0}, 0.5) is None
    assert percentiles({}) is None


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    old = read_scrape('squadron_a_total{b="1"} 10\nother_total 3\n', 0.0)
    new = read_scrape('squadron_a_total{b="1"} 4\nsquadron_a_total{b="2"} 2\n', 2.0)
    assert Window(old, new).rate("a_total") == pytest.approx(3.0)
    assert Window(old, new).rate("a_total", b="2") == pytest.approx(1.0)
    assert "other_total" not in old.samples


def test_without_windows_a_picture_has_no_rates() -> None:
    report = FakeApp().watch().poll().report
    assert make_picture(report, ()).models == ()
