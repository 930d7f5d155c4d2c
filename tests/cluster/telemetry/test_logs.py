"""What is logged: one JSON object a line whatever is in it, with the ids that tell requests and processes apart."""

from __future__ import annotations

import io
import json
import logging
import logging.handlers
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN, set_span_in_context
from rich.text import Text

from cluster.config import ClusterConfig, parse_config
from cluster.router.live_model import LoggedSource
from cluster.telemetry.logs import (
    OUR_PACKAGES,
    JsonLines,
    about,
    about_request,
    log_to_serve,
    log_to_stderr,
    rank_fields,
)
from cluster.telemetry.tracing.call_trace import call_trace
from cluster.token_source import CallContext
from deploy.cli.terminal import JsonConsole, terminal
from engine.errors import ConfigError
from tests.cluster.cluster_lab import Lab, long_request
from tests.cluster.telemetry.tracing_lab import BODY, TRACE, TRACEPARENT, Spans, TracedLab, traced_client
from tests.engine.engine_driver import VOCAB
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

SECRET = "xyzzyplugh"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def our_loggers():
    """Give the loggers back as they were."""
    loggers = [logging.getLogger(name) for name in (*OUR_PACKAGES, "ray.serve", None)]
    before = [(one.handlers, one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def lines(caplog):
    """Return the JSON lines of what was logged so far."""
    caplog.set_level(logging.DEBUG, "cluster")
    caplog.set_level(logging.DEBUG, "engine")
    formatter = JsonLines({"router": "r"})
    ours = ("cluster", "engine", "parallel")
    return lambda: [formatter.format(one) for one in caplog.records if one.name.startswith(ours)]


def record(message: str, *args: object, **changes: object) -> logging.LogRecord:
    made = logging.LogRecord("cluster.some", logging.WARNING, __file__, 1, message, args, None)
    made.__dict__.update(changes)
    return made


@given(st.text(), st.dictionaries(st.sampled_from(["request_id", "tenant"]), st.text()))
def test_any_message_is_one_line_that_reads_back(text, fields):
    line = JsonLines({"replica": "a", "rank": 1}).format(record("got %s", text, squadron=fields))
    assert len(line.splitlines()) == 1
    read = json.loads(line)
    assert read["message"] == f"got {text}"
    assert (read["level"], read["logger"], read["replica"], read["rank"]) == ("warning", "cluster.some", "a", 1)
    assert read["ts"].endswith("+00:00")
    if "tenant" in fields:
        assert read["tenant"] == fields["tenant"]


class Unspeakable:
    """Can be told in no way."""

    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    "value", [{(1, 2): 3}, float("nan"), [float("inf")], Unspeakable(), {1, 2}, b"\xff", "\ud800"]
)
def test_field_that_is_no_json_does_not_cost_the_line(value):
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    line = JsonLines({"rank": 0}).format(record("as ever", squadron={"params": value}))
    read = json.loads(line, parse_constant=refuse)
    assert (read["message"], read["level"]) == ("as ever", "warning")
    assert "params" in read


@pytest.mark.parametrize(("message", "args"), [("%d of %s", ("a",)), ("%s", (Unspeakable(),)), (Unspeakable(), ())])
def test_message_that_cannot_be_made_does_not_cost_the_line(message, args):
    read = json.loads(JsonLines({"rank": 0}).format(record(message, *args)))
    assert (read["level"], read["rank"]) == ("warning", 0)
    assert read["message"]


def test_exception_is_a_field_of_the_same_line():
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        line = JsonLines().format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: first\nsecond")


def test_engines_ids_of_attempts_are_told_as_request_and_attempt():
    read = json.loads(JsonLines().format(record("shed", **about_request("cmpl-1@2.16"))))
    assert (read["request_id"], read["attempt"]) == ("cmpl-1", "2.16")


def test_serves_own_request_id_does_not_displace_ours():
    fields = about({"id": "req-ours", "client_id": "", "error": "overloaded"})
    read = json.loads(JsonLines().format(record("refused", request_id="serve's", **fields)))
    assert (read["request_id"], read["code"]) == ("req-ours", "overloaded")
    assert "client_id" not in read


def test_serves_handlers_write_json_for_all(our_loggers):
    out, behind = io.StringIO(), io.StringIO()
    buffered = logging.handlers.MemoryHandler(1, target=logging.StreamHandler(behind))
    logging.getLogger("ray.serve").handlers = [logging.StreamHandler(out), buffered]
    logging.getLogger("ray.serve").propagate = False  # as Serve has it
    log_to_serve(log_format="json", process={"replica": "a", "rank": 0})
    logging.getLogger("engine.core").info("ours", extra=about_request("r@1.2"))
    logging.getLogger("ray.serve").error("Serve's")
    for stream in (out, behind):
        read = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [(one["logger"], one["replica"], one["rank"]) for one in read] == [
            ("engine.core", "a", 0),
            ("ray.serve", "a", 0),
        ]
        assert read[0]["request_id"] == "r"


@pytest.mark.parametrize("process", ["of Serve", "rank"])
def test_libraries_write_json_too(our_loggers, capsys, process):
    out = io.StringIO()
    logging.getLogger("ray.serve").handlers = [logging.StreamHandler(out)]
    if process == "rank":
        log_to_stderr({"rank": 1})
    else:
        log_to_serve(log_format="json", process={"rank": 1})
    # As the SDK says it of a span that was ended twice, and of a bad environment variable.
    span = Spans().tracing().span("one", 0.0, 1.0, set_span_in_context(INVALID_SPAN))
    span.end()
    logging.getLogger("opentelemetry.sdk.trace.export").error("bad\nvalue")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    told = capsys.readouterr().err if process == "rank" else out.getvalue() + capsys.readouterr().err
    read = [json.loads(line) for line in told.splitlines()]
    assert [one["logger"] for one in read] == [
        "opentelemetry.sdk.trace",
        "opentelemetry.sdk.trace.export",
        "py.warnings",
    ]
    assert read[1]["message"] == "bad\nvalue"
    assert {one["rank"] for one in read} == {1}


def test_text_stays_as_serve_writes_it(our_loggers):
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("TEXT %(message)s"))
    logging.getLogger("ray.serve").handlers = [handler]
    log_to_serve(log_format="text", process={"replica": "a"})
    before = list(logging.getLogger().handlers)
    logging.getLogger("cluster.deployments.router").info("as ever", extra=about({"id": "r"}))
    assert out.getvalue() == "TEXT as ever\n"
    assert logging.getLogger().handlers == before


def test_ranks_write_json_to_standard_error(our_loggers, capsys):
    settings = {"model": "/models/demo", "served_model_name": ["demo", "alias"]}
    log_to_stderr(rank_fields("a", settings, rank=3))
    logging.getLogger("parallel.message_ring").info("rank %d is up", 3)
    read = json.loads(capsys.readouterr().err)
    assert (read["replica"], read["rank"], read["model"], read["message"]) == ("a", 3, "demo", "rank 3 is up")


def test_the_command_prints_lines_of_json(capsys):
    console = terminal(json_lines=True)
    assert isinstance(console, JsonConsole)
    console.print("Replica a is lost;\nothers go on", markup=False)
    console.print("[bold red]Warning:[/] anybody can use it")
    console.print(Text.assemble(("Warning:", "bold red"), " [/some/path] is no markup"))
    with console.status("Replicas ..."):
        console.print("[not markup]", markup=False)
    read = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["message"] for one in read] == [
        "Replica a is lost;\nothers go on",
        "Warning: anybody can use it",
        "Warning: [/some/path] is no markup",
        "[not markup]",
    ]
    assert [one["level"] for one in read] == ["info", "warning", "warning", "info"]
    assert {one["logger"] for one in read} == {"squadron.serve"}
    assert not isinstance(terminal(json_lines=False), JsonConsole)


async def test_lines_of_a_request_bear_its_ids_and_its_trace(model, lines):
    async with TracedLab() as lab, traced_client(lab, model, api_key="right") as client:
        headers = {"authorization": "Bearer right", "x-request-id": "mine", "traceparent": TRACEPARENT}
        refused = await client.post("/v1/completions", json=BODY | {"max_tokens": -1}, headers=headers)
        await client.post("/v1/completions", json=BODY, headers=headers | {"authorization": "Bearer no"})
    first, second = [json.loads(line) for line in lines()]
    assert first["request_id"] == refused.json()["error"]["request_id"]
    assert (first["client_id"], first["model"], first["tenant"]) == ("mine", MODEL, "default")
    assert first["code"] == refused.json()["error"]["code"]
    assert second["code"] == "invalid_api_key"
    assert {first["trace_id"], second["trace_id"]} == {TRACE}
    assert first["router"] == "r"


# Bodies with the secret in every place where a client can put text, good ones and bad ones.
FUZZED = [
    {"prompt": SECRET},
    {"prompt": [SECRET]},
    {"prompt": SECRET * 4000},
    {"prompt": {SECRET: SECRET}},
    {"prompt": [5, VOCAB + 9], "stop": [SECRET]},
    {"prompt": [5], "stop": [SECRET] * 99},
    {"prompt": [5], "stop": SECRET, "max_tokens": SECRET},
    {"prompt": [5], "bad_words": [SECRET], "user": SECRET},
    {"prompt": [5], "suffix": SECRET},
    {"prompt": [5], SECRET: 1},
    {"prompt": [5], "structured_outputs": {"regex": SECRET}},
    {"prompt": [5], "structured_outputs": {"json": {"title": SECRET}}},
    {"prompt": [5], "logit_bias": {SECRET: 1}},
    {"prompt": [5], "cache_salt": SECRET},
]
CHATS = [
    {"messages": [{"role": "user", "content": SECRET}]},
    {"messages": [{"role": SECRET, "content": SECRET}]},
    {"messages": [{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}]},
    {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": SECRET}}]},
    {"messages": SECRET},
    {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": SECRET}},
]


@pytest.mark.parametrize("logged", [False, True])
async def test_no_line_holds_a_text_of_a_clients(model, lines, caplog, logged):
    async with Lab() as lab:
        await lab.start("a")
        source = LoggedSource(lab.dispatcher, model.tokenizer, MODEL, 0) if logged else lab.dispatcher
        async with client_for(app_for(source, model)) as client:
            bodies = [("/v1/completions", one) for one in FUZZED] + [("/v1/chat/completions", one) for one in CHATS]
            bodies += [("/v1/embeddings", {"input": SECRET}), ("/v1/responses", {"input": SECRET})]
            statuses = set()
            for path, body in bodies:
                asked = {"model": MODEL, "max_tokens": 3, **body}
                if path in ("/v1/embeddings", "/v1/responses"):
                    del asked["max_tokens"]
                statuses.add((await client.post(path, json=asked)).status_code)
            cut, kind = f'{{"prompt": "{SECRET}', {"content-type": "application/json"}
            statuses.add((await client.post("/v1/completions", content=cut, headers=kind)).status_code)
    assert statuses >= {200, 400}, "some were served, some were not"
    told = "".join(lines()) + caplog.text  # of whoever logs: a library of ours would tell it as well
    assert len(lines()) >= len(FUZZED) // 2
    assert SECRET not in told
    assert ("prompt tokens" in told) is logged


async def test_prompts_are_logged_where_that_is_asked_for_and_no_more_than_that(model, lines):
    async with client_for(app_for(LoggedSource(saying(model, "ok"), model.tokenizer, MODEL, 8), model)) as client:
        body = {
            "model": MODEL,
            "prompt": "line\nbreak and more",
            "stop": [SECRET],
            "temperature": 0.5,
            "max_tokens": 9,
        }
        answer = await client.post("/v1/completions", json=body)
    (line,) = lines()
    read = json.loads(line)
    assert read["prompt"] == "line\nbre"
    assert read["request_id"] == answer.json()["id"]
    assert (read["model"], read["tenant"]) == (MODEL, "default")
    assert read["prompt_tokens"] == len(model.tokenizer.encode(body["prompt"]))
    assert (read["params"]["temperature"], read["params"]["max_tokens"]) == (0.5, 9)
    assert "\n" not in read["message"]
    assert SECRET not in line


async def test_requests_are_logged_with_their_lengths_where_that_is_asked_for(model, lines):
    async with Lab() as lab:
        await lab.start("a")
        source = LoggedSource(lab.dispatcher, model.tokenizer, MODEL, 0)
        async for _ in source.generate(long_request("r", max_tokens=None, logit_bias={5: 1.0})):
            pass
    read = json.loads(lines()[0])
    assert read["prompt_tokens"] == 5
    assert read["params"] == {"max_tokens": None, "ignore_eos": True, "logit_bias": 1}
    assert not {"prompt", "trace_id"} & set(read)


async def test_line_of_a_traced_request_bears_its_trace(model, lines):
    async with TracedLab() as lab:
        source = LoggedSource(saying(model, "ok"), model.tokenizer, MODEL, 0)
        trace = call_trace(lab.spans.tracing(), "call", "chat", {"traceparent": TRACEPARENT}, {})
        async for _ in source.generate(long_request("r"), CallContext(trace=trace)):
            pass
    assert json.loads(lines()[0])["trace_id"] == TRACE


def test_settings_are_checked_by_name():
    config = parse_config({"model": "demo", "log-format": "json", "enable_log_requests": True, "max_log_len": 20})
    assert (config.log_format, config.enable_log_requests, config.max_log_len) == ("json", True, 20)
    assert (ClusterConfig("demo").log_format, ClusterConfig("demo").enable_log_requests) == ("text", False)
    with pytest.raises(ConfigError, match="log_format: must be one of text, json"):
        parse_config({"model": "demo", "log_format": "xml"})
    with pytest.raises(ConfigError, match="max_log_len"):
        parse_config({"model": "demo", "max_log_len": -1})
