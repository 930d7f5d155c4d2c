"""Reads the queries of dashboards and alerts with a parser of PromQL: what they name, and whether it is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser

from cluster.telemetry.families import PREFIX, RAY_PREFIX, TABLE, VLLM_RAY, Family, Kind
from deploy.observability.promql import CLUSTER, SERVE_HEALTHY, SERVE_STATUS, SERVE_WANTED

ENDINGS = {Kind.COUNTER: ("",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
SERVE_LABELS = frozenset({"deployment", "application"})


@dataclass(frozen=True)
class Named:
    """A metric that a query names, and the labels that it matches or sums by."""

    metric: str
    labels: frozenset[str]


def bounded(expr: str, every: str = "1m", span: str = "1h") -> str:
    """Return a query with what Grafana puts in for its spans of time."""
    return expr.replace("$__rate_interval", every).replace("$__range", span)


def filled(expr: str, every: str = "1m", span: str = "1h") -> str:
    """Return a query with what Grafana puts in for its variables, where all is chosen."""
    expr = bounded(expr, every, span)
    for name in ("cluster", "model_name", "replica"):
        expr = expr.replace(f"${name}", ".*")
    assert "$" not in expr, expr
    return expr


def named(expr: str) -> list[Named]:
    """Return what a query names. Raises `ValueError` where it is no PromQL."""
    found: list[Named] = []

    def look(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(Named(node.name, frozenset(matcher.name for matcher in node.matchers.matchers)))
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped = frozenset(node.modifier.labels)
            found.extend(Named(one.metric, one.labels | grouped) for one in named(str(node.expr)))

    promql_parser.walk(promql_parser.parse(filled(expr)), look)
    return found


def selectors(expr: str) -> list[frozenset[str]]:
    """Return the matchers of each selector of a query, as PromQL writes them without spaces."""
    found: list[frozenset[str]] = []

    def look(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(frozenset(map(str, node.matchers.matchers)))

    promql_parser.walk(promql_parser.parse(expr), look)
    return found


def trouble(expr: str) -> list[str]:
    """Return what a query names that nobody makes."""
    known = dict(_known())
    lines = []
    for one in named(expr):
        if one.metric not in known:
            lines.append(f"no figure {one.metric}")
        elif unknown := one.labels - known[one.metric] - {CLUSTER}:
            lines.append(f"{one.metric} has no label {', '.join(sorted(unknown))}")
    return lines


def family_of(metric: str) -> Family | None:
    """Return the family of a metric that a query names; None of one of Ray Serve's."""
    return dict(_by_metric()).get(metric)


def _known() -> Iterator[tuple[str, frozenset[str]]]:
    for metric, family in _by_metric():
        yield metric, frozenset(family.ray_labels) | ({"le"} if metric.endswith("_bucket") else set())
    yield from ((metric, SERVE_LABELS) for metric in (SERVE_HEALTHY, SERVE_WANTED, SERVE_STATUS))


def _by_metric() -> Iterator[tuple[str, Family]]:
    for family in TABLE:
        for ending in ENDINGS[family.kind]:
            yield RAY_PREFIX + family.shown_name + ending, family
            if family.vllm:  # with --metrics-compat vllm
                yield RAY_PREFIX + VLLM_RAY + family.shown_name.removeprefix(PREFIX) + ending, family
