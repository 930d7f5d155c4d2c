"""What a client, or a router, sends as the context of a trace: whatever it is, it does no harm."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.http.request_spans import RouterTracing, TracedApp
from cluster.telemetry.tracing.call_trace import call_trace
from cluster.wire.codec import decode_up, encode
from cluster.wire.parts import TraceContext
from cluster.wire.translation import submit_message
from tests.cluster.cluster_lab import long_request
from tests.cluster.telemetry.tracing_lab import TRACE, TRACEPARENT, Spans, TracedLab

HEX = st.text("0123456789abcdef", min_size=1, max_size=40)
PARENTS = st.one_of(
    st.text(max_size=80),
    st.builds("{}-{}-{}-{}".format, HEX, HEX, HEX, HEX),
    st.builds(
        "00-{}-{}-{}".format,
        st.text("0123456789abcdef", min_size=32, max_size=32),
        st.text("0123456789abcdef", min_size=16, max_size=16),
        st.sampled_from(["00", "01", "03", "ff"]),
    ),
)
STATES = st.one_of(st.text(max_size=700), st.builds(lambda one, n: ",".join([one] * n), HEX, st.integers(1, 300)))


@pytest.fixture(scope="module")
def traced():
    spans = Spans()
    return spans, spans.tracing()


@given(PARENTS, STATES)
def test_whatever_a_client_sends_as_context_does_no_harm(traced, parent, state):
    spans, tracing = traced
    spans.exporter.clear()
    trace = call_trace(tracing, "call", "chat", {"traceparent": parent, "tracestate": state}, {})
    if trace is None:
        assert int(parent[-2:], 16) & 1 == 0, "only a parent that does not sample keeps spans away"
        return
    request = trace.request(long_request("r"))
    sent = tracing.carried(request._span)
    message = submit_message(long_request("r"), 0, trace=sent)
    assert decode_up(encode(message)).trace == sent, "the replica must be able to read it"
    trace.end({})
    (span,) = spans.all()
    if span.parent is not None:
        assert f"-{span.parent.trace_id:032x}-{span.parent.span_id:016x}-" in parent


@pytest.mark.parametrize(
    ("parent", "state"),
    [
        (TRACEPARENT, "SECRET with spaces and no sign"),
        (TRACEPARENT, ",".join(f"SECRET{number}=1" for number in range(40))),
        (TRACEPARENT + "SECRET" * 100, ""),
    ],
)
def test_bad_context_of_a_client_is_quoted_in_no_line(caplog, parent, state):
    tracing = Spans().tracing()
    with caplog.at_level(logging.DEBUG):
        tracing.parent_of({"traceparent": parent, "tracestate": state})
    assert caplog.records == [], "neither its text, nor a line for each of its calls"


def brought_to(ingress: str, headers: list[tuple[str, str]]):
    """Return the span of a call with these headers, and what is sent on with its requests."""
    spans = Spans()
    tracing = RouterTracing(spans.tracing())
    if ingress == "grpc":
        trace = tracing.rpc("Chat", headers)
    else:
        raw = [(name.encode(), value.encode()) for name, value in headers]
        path = "/v1/completions"
        trace = TracedApp(None, spans.tracing())._begin({"type": "http", "path": path, "headers": raw})
    sent = trace._tracing.carried(trace._span)
    trace.end({})
    return spans.all()[0], sent


@pytest.mark.parametrize("ingress", ["http", "grpc"])
def test_several_headers_of_state_are_one_list(ingress):
    """As proxies write them: each its own. Source: W3C Trace Context, 3.3.1."""
    states = [("tracestate", "one=1,two=2"), ("tracestate", "three=3"), ("accept", "x"), ("tracestate", "")]
    span, sent = brought_to(ingress, [("traceparent", TRACEPARENT), *states])
    assert sent.tracestate == "one=1,two=2,three=3"
    assert f"{span.context.trace_id:032x}" == TRACE


@pytest.mark.parametrize("ingress", ["http", "grpc"])
def test_call_with_several_parents_has_none(ingress):
    other = f"00-{'1' * 32}-{'2' * 16}-01"
    headers = [("traceparent", TRACEPARENT), ("tracestate", "one=1"), ("traceparent", other)]
    span, sent = brought_to(ingress, headers)
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" not in (TRACE, "1" * 32)
    assert sent.tracestate == ""


async def test_context_that_is_no_context_is_passed_over_by_a_replica():
    async with TracedLab() as lab:
        spans = lab.spans.engine("a")
        for carried in ("", "00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
            spans.begin(long_request("r"), TraceContext(carried), 0.0)
        spans.abandon("engine_dead", 1.0)
        assert lab.spans.all() == []
