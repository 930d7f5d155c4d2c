"""A router's app, its dispatcher and replicas on the fake model, whose spans are kept in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.http.request_spans import RouterTracing
from cluster.openai.served_model import ServedModel
from cluster.telemetry.tracing.engine_spans import EngineSpans
from cluster.telemetry.tracing.provider import Tracing, tracing_with
from tests.cluster.cluster_lab import Lab, LabReplica
from tests.openai_app import MODEL, app_for, client_for

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
BODY = {"model": MODEL, "prompt": [5, 6, 7, 8, 9], "max_tokens": 12, "ignore_eos": True, "stream": True}


@dataclass
class Spans:
    """What was exported, by the names that the tests look for."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def tracing(self, role: str = "router", instance: str = "r") -> Tracing:
        return tracing_with(SimpleSpanProcessor(self.exporter), role, instance)

    def engine(self, replica: str) -> EngineSpans:
        return EngineSpans(self.tracing("replica", replica), replica, MODEL)

    def all(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return sorted((one for one in self.all() if one.name == name), key=lambda one: one.start_time)

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        ours = [one for one in self.all() if one.parent and one.parent.span_id == parent.context.span_id]
        return sorted(ours, key=lambda one: one.start_time)

    def tree(self, span: ReadableSpan) -> tuple:
        """A span's name, and the trees below it in order of time."""
        return span.name, *[self.tree(child) for child in self.children(span)]


class TracedLab(Lab):
    """A lab whose replicas trace."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self.spans = Spans()

    async def begin(self, name: str, **changes) -> LabReplica:
        return await self.start(name, spans=self.spans.engine(name), **changes)


@asynccontextmanager
async def traced_client(lab: TracedLab, model: ServedModel, **changes) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app in front of the lab's dispatcher."""
    app = RouterTracing(lab.spans.tracing()).app(app_for(lab.dispatcher, model, **changes))
    async with client_for(app) as client:
        yield client


async def post(client: httpx.AsyncClient, path="/v1/completions", headers=None, **changes) -> httpx.Response:
    return await client.post(path, json={**BODY, **changes}, headers=headers)
