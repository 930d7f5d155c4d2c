"""Where spans go: a file that many processes share, a collector that may be down, or nowhere at no cost."""

from __future__ import annotations

import errno
import http.server
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    server_attributes,
    service_attributes,
    url_attributes,
)

from cluster.config import parse_config
from cluster.config_values import OTLP_PATH, checked_endpoint, file_of
from cluster.http.request_spans import RouterTracing
from cluster.telemetry.tracing import provider, semantics
from cluster.telemetry.tracing.call_trace import call_trace
from cluster.telemetry.tracing.engine_spans import EngineSpans
from cluster.telemetry.tracing.provider import FileExporter, ForgivingExporter, exporter_to, tracing_to
from cluster.telemetry.tracing.start import process_tracing, replica_spans
from cluster.wire.parts import TraceContext
from engine.errors import ConfigError
from tests.cluster.cluster_lab import long_request
from tests.cluster.telemetry.tracing_lab import Spans
from tests.openai_app import MODEL, app_for, saying, served_model, serving

ROOT = Path(__file__).parents[3]


def write_spans(path: Path, who: str, count: int) -> None:
    tracing = tracing_to(FileExporter(path), "replica", who)
    for number in range(count):
        tracing.span("one", number, number + 1, tracing.parent_of({}), {"filler": "é" * 500})
    tracing.close()


def test_writers_that_share_a_file_write_whole_lines(tmp_path):
    path = tmp_path / "traces.jsonl"
    writers = [threading.Thread(target=write_spans, args=(path, str(i), 300)) for i in range(2)]  # a descriptor each
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(spans) == 600
    assert {span["resource"]["attributes"]["service.instance.id"] for span in spans} == {"0", "1"}
    assert path.stat().st_mode & 0o777 == 0o600


def test_line_after_a_torn_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "traces.jsonl"
    exporter, after = ForgivingExporter(FileExporter(path)), FileExporter(path)
    write, room = os.write, 40

    def full_disk(file: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written, room = write(file, data[:room]), 0
        return written

    (span,) = some_spans(1)
    with monkeypatch.context() as while_full:
        while_full.setattr(os, "write", full_disk)
        assert exporter.export([span]) is SpanExportResult.FAILURE
        assert exporter.export([span]) is SpanExportResult.FAILURE
    assert path.stat().st_size == 40
    for one in (after, exporter, after):  # another process meets the torn line first
        assert one.export([span]) is SpanExportResult.SUCCESS
    torn, *whole = path.read_text().splitlines()
    assert len(torn) == 40
    assert [json.loads(line)["name"] for line in whole] == ["one"] * 3


def test_what_is_no_file_on_a_disk_is_written_to_as_well(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    exporter = FileExporter(tmp_path / "pipe")
    assert exporter.export(some_spans(2)) is SpanExportResult.SUCCESS
    assert len(os.read(reader, 65536).splitlines()) == 2
    exporter.shutdown()
    os.close(reader)


def some_spans(count: int) -> list[ReadableSpan]:
    spans = Spans()
    for number in range(count):
        spans.tracing().span("one", number, number + 1, spans.tracing().parent_of({}))
    return spans.all()


@pytest.mark.parametrize(("step", "followed"), [(3600.0, 3600.0), (-3600.0, -3600.0), (0.02, 0.0)])
def test_wall_clock_that_is_set_is_followed_by_calls_that_come_later(monkeypatch, step, followed):
    wall, monotonic = 1e9, 5.0
    monkeypatch.setattr(provider.time, "time_ns", lambda: int(wall * 1e9))
    monkeypatch.setattr(provider.time, "monotonic_ns", lambda: int(monotonic * 1e9))
    spans = Spans()
    router, replica = spans.tracing(), spans.engine("a")
    wall += 10 + step
    monotonic += 10
    trace = call_trace(router, "call", "chat", {}, {})
    replica.begin(long_request("r"), TraceContext(trace.response), monotonic)
    replica.abandon("closed", monotonic)
    trace.end({})
    told = [router.nanos(monotonic), spans.one("engine").start_time]
    assert told == [pytest.approx((1e9 + 10 + followed) * 1e9, abs=1e6)] * 2


class DeadCollector(SpanExporter):
    """Takes nothing; hangs until told to go on, where told so."""

    def __init__(self, hangs: bool = False) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()
        if not hangs:
            self.goes_on.set()

    def export(self, spans):
        self.asked.set()
        self.goes_on.wait(60)
        raise ConnectionError("refused")

    def shutdown(self) -> None:
        """Nothing to end."""


def test_collector_that_is_down_is_told_of_once_a_minute(caplog):
    now = 0.0
    exporter = ForgivingExporter(DeadCollector(), lambda: now)
    with caplog.at_level(logging.WARNING):
        for seconds in range(130):
            now = float(seconds)
            assert exporter.export(["span", "span"]) is SpanExportResult.FAILURE
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == ["2", "120", "120"]
    assert all("ConnectionError: refused" in line for line in lines)


def test_collector_that_hangs_holds_up_neither_spans_nor_the_end(monkeypatch):
    monkeypatch.setattr(provider, "CLOSE_SECONDS", 0.2)
    collector = DeadCollector(hangs=True)
    tracing = tracing_to(collector, "router", "r")
    for number in range(5000):  # more than the queue holds
        tracing.span("one", number, number + 1, tracing.parent_of({}))
    assert collector.asked.wait(10)
    tracing.close()
    assert not collector.goes_on.is_set(), "it went on without the collector"
    collector.goes_on.set()


async def test_spans_that_wait_are_exported_when_router_and_replica_stop(monkeypatch, tmp_path):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # milliseconds: nothing leaves of its own accord
    path, model = tmp_path / "traces.jsonl", served_model(tmp_path / "model")
    tracing = RouterTracing(tracing_to(FileExporter(path), "router", "r"))
    spans = EngineSpans(tracing_to(FileExporter(path), "replica", "a"), "a", MODEL)
    spans.begin(long_request("r"), TraceContext(f"00-{'1' * 32}-{'1' * 16}-01"), 0.0)
    spans.abandon("closed", 1.0)
    async with serving(tracing.app(app_for(saying(model, "ok"), model))) as url, httpx.AsyncClient() as client:
        assert (await client.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code == 200
        assert path.read_text() == ""
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["POST /v1/completions"]
    spans.close()
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()][1:] == ["engine"]


def test_collector_gets_otlp_over_http():
    bodies: list[tuple[str, str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append((self.path, self.headers["content-type"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = checked_endpoint(f"http://127.0.0.1:{server.server_port}")
        tracing = tracing_to(exporter_to(endpoint), "router", "r")
        tracing.span("a span of ours", 0.0, 1.0, tracing.parent_of({}))
        tracing.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    ((path, kind, body),) = bodies
    assert (path, kind) == (OTLP_PATH, "application/x-protobuf")
    assert b"a span of ours" in body


@pytest.mark.parametrize(
    ("given_url", "used"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector.example/", "https://collector.example/v1/traces"),
        ("http://[::1]:4318/custom/path", "http://[::1]:4318/custom/path"),
        ("file:///tmp/traces.jsonl", "file:///tmp/traces.jsonl"),
    ],
)
def test_good_endpoints(given_url, used):
    assert parse_config({"model": "demo", "otlp-traces-endpoint": given_url}).otlp_traces_endpoint == used


def test_path_of_a_file_is_unquoted():
    assert file_of(checked_endpoint("file:///tmp/my%20traces%23.jsonl")) == Path("/tmp/my traces#.jsonl")


@pytest.mark.parametrize(
    "url",
    ["", "localhost:4318", "grpc://localhost:4317", "http://", "http://host:99999", "file://traces.jsonl", "file:///",
     "ftp://host/x", "http://[::1", "file:///tmp/a?b", "file:///tmp/a#b", "file:///tmp/a%00b"],
)  # fmt: skip
def test_bad_endpoints_are_refused_by_the_flags_name(url):
    with pytest.raises(ConfigError, match=r"^otlp_traces_endpoint: must .*(such as|http)") as info:
        parse_config({"model": "demo", "otlp_traces_endpoint": url})
    assert info.value.flag == "otlp_traces_endpoint"


@given(st.text(max_size=60))
def test_any_text_is_an_endpoint_or_a_clear_refusal(text):
    try:
        url = checked_endpoint(text)
    except ValueError as error:
        assert str(error).startswith("must ")
    else:
        assert checked_endpoint(url) == url
        assert url.startswith("http") or file_of(url) is not None


def test_folder_that_is_missing_and_package_that_is_missing_are_told(monkeypatch, tmp_path):
    config = parse_config({"model": "demo", "otlp_traces_endpoint": f"file://{tmp_path}/no/traces.jsonl"})
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint: cannot write.*name a file in a folder that exists"):
        process_tracing(config, "router", "r")
    config = parse_config({"model": "demo", "otlp_traces_endpoint": "http://localhost:4318"})
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint: .* is not installed.*'\.\[otel\]'"):
        replica_spans(config, "a")


def test_off_is_off():
    config = parse_config({"model": "demo"})
    assert process_tracing(config, "router", "r") is None
    assert replica_spans(config, "a") is None


SERVES_A_REQUEST = """
import asyncio, sys, tempfile
from pathlib import Path
from cluster.telemetry.tracing.start import process_tracing, replica_spans
from tests.openai_app import app_for, client_for, served_model
from tests.cluster.cluster_lab import Lab

async def main():
    model = served_model(Path(tempfile.mkdtemp()))
    async with Lab() as lab, client_for(app_for(lab.dispatcher, model)) as client:
        await lab.start("a")
        body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "stream": True}
        headers = {"traceparent": "00-" + "1" * 32 + "-" + "1" * 16 + "-01"}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text

asyncio.run(main())
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


def test_nothing_of_opentelemetry_is_imported_where_tracing_is_off():
    done = subprocess.run(
        [sys.executable, "-c", SERVES_A_REQUEST], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_names_are_those_of_the_standard():
    modules = (
        gen_ai_attributes,
        rpc_attributes,
        error_attributes,
        http_attributes,
        server_attributes,
        service_attributes,
        url_attributes,
    )
    standard = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    standard |= {"service.instance.id"}  # of the resource's own list
    deprecated = {"gen_ai.system", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens", "rpc.system"}
    ours = {value for name, value in vars(semantics).items() if name.isupper() and isinstance(value, str)}
    dotted = {value for value in ours if "." in value}
    assert {value for value in dotted if not value.startswith("squadron.")} <= standard - deprecated
    assert all(value.startswith(("squadron.", *{one.split(".")[0] + "." for one in standard})) for value in dotted)
