"""What a dashboard is made of. One panel shows one thing: its queries, their unit, and what to make of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "stat"]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression. legend: names its series, with `{{label}}` for their labels."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    unit: as Grafana calls it, such as `s`, `reqps`, `percentunit`. description: what it is and when to worry.
    warn / alarm: values from which on it is orange and red. stacked: the series add up to something. top: of the
    scale, None = as high as the data.
    """

    title: str
    unit: str
    description: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    stacked: bool = False
    warn: float | None = None
    alarm: float | None = None
    top: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, of equal width, at most `ACROSS` beside each other."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """What a viewer chooses by: the values of a label. metric: with its matchers, whose series are asked for them."""

    name: str
    title: str
    label: str
    metric: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard. uid: by which links and Grafana find it."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        """Yield all panels."""
        for row in self.rows:
            yield from row.panels
