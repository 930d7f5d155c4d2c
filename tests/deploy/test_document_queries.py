"""Expressions of PromQL in the documents ask for figures as Prometheus has them, by labels that these have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.promql import named, trouble

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "helm" / "squadron" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IN_LINE = re.compile(r"`([^`\n]+)`")
FIGURE = re.compile(r"(squadron|vllm)_[a-z]")


def queries(text: str) -> Iterator[str]:
    """Yield the expressions of a page: of its blocks of PromQL and YAML, and those between its words."""
    for language, block in FENCED.findall(text):
        if language == "promql":
            yield from filter(None, (line.partition("#")[0].strip() for line in block.splitlines()))
        elif language == "yaml":
            yield from _in_yaml(yaml.safe_load(block))
        elif FIGURE.search(block) and re.search(r"\b(rate|sum|increase)\b.*\(", block):
            raise ValueError(f"say ```promql, so that this is checked: {block}")
    for span in IN_LINE.findall(FENCED.sub("", text)):
        if FIGURE.search(span) and ("(" in span or "=" in span or " / " in span):
            yield span


def _in_yaml(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from [inner] if key in ("query", "expr") else _in_yaml(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _in_yaml(inner)


FOUND = [(path.name, query) for path in PAGES for query in queries(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "query"), FOUND)
def test_a_documents_query_names_figures_and_labels_that_prometheus_has(page: str, query: str) -> None:
    query = re.sub(r"(?<![\w:])squadron_", "ray_squadron_", query)  # a figure at /metrics, where Ray adds no name
    assert named(query), page
    assert trouble(query) == [], page


def test_queries_are_found() -> None:
    pages = {page for page, _ in FOUND}
    assert {"metrics.md", "tenants.md"} <= pages
    assert len(FOUND) >= 6


def test_what_waits_is_asked_of_routers_and_replicas() -> None:
    """A scaler that asks replicas alone sees hardly anybody: routers hold back what replicas have no room for."""
    (scaler,) = (query for page, query in FOUND if page == "metrics.md" and "vector(0)" in query)
    asked = {one.metric for one in named(scaler)}
    assert asked == {"ray_squadron_requests_queued", "ray_squadron_num_requests_waiting"}


def test_what_is_wrong_is_noticed() -> None:
    page = "Text `rate(squadron_requests_live[5m])`.\n\n```yaml\na: [{query: sum(ray_squadron_none)}]\n```\n"
    assert [*queries(page)] == ["sum(ray_squadron_none)", "rate(squadron_requests_live[5m])"]
    assert all(trouble(query) for query in queries(page))
    with pytest.raises(ValueError, match="say ```promql"):
        [*queries("```\nsum(ray_squadron_requests_live)\n```\n")]
