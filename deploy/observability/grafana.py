"""What a dashboard is made of, and its JSON for Grafana: schema version 41, of Grafana 12; newer ones update it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

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


SCHEMA_VERSION = 41
COLUMNS = 24  # of Grafana's grid
ACROSS = {"timeseries": 4, "stat": 6}  # panels beside each other
HEIGHT = {"timeseries": 8, "stat": 4}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]


def dashboard_text(dashboard: Dashboard) -> str:
    """Return the JSON of a dashboard, as it is imported or provisioned."""
    return json.dumps(_dashboard(dashboard), indent=1) + "\n"


def _dashboard(dashboard: Dashboard) -> Json:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["squadron"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [_link()],
        "templating": {"list": [_data_source(), *map(_variable, dashboard.variables)]},
        "panels": list(_panels(dashboard)),
    }


def _link() -> Json:
    return {
        "type": "dashboards",
        "title": "Squadron",
        "tags": ["squadron"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }


def _data_source() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.title,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "variable"},
        "refresh": 2,  # whenever the time shown changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _panels(dashboard: Dashboard) -> Iterator[Json]:
    top, number = 0, 1
    for row in dashboard.rows:
        yield _heading(row, number, top)
        top, number = top + 1, number + 1
        for panel, place in zip(row.panels, places(row), strict=True):
            yield _panel(panel, number, place | {"y": top + place["y"]})
            number += 1
        top += max(place["y"] + place["h"] for place in places(row))


def places(row: Row) -> list[dict[str, int]]:
    """Return where the panels of a row stand, from the row's top: x, y, w, h in Grafana's grid."""
    kind = row.panels[0].kind
    across = min(len(row.panels), ACROSS[kind])
    if len(row.panels) > across:
        across = next(number for number in (across, across - 1, 2) if len(row.panels) % number == 0 or number == 2)
    width, height = COLUMNS // across, HEIGHT[kind]
    return [
        {"x": index % across * width, "y": index // across * height, "w": width, "h": height}
        for index in range(len(row.panels))
    ]


def _heading(row: Row, number: int, top: int) -> Json:
    place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _STAT_OPTIONS if panel.kind == "stat" else _TIME_OPTIONS,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _defaults(panel: Panel) -> Json:
    scale = {"min": 0} | ({} if panel.top is None else {"max": panel.top})
    defaults: Json = {"unit": panel.unit, **scale, "thresholds": {"mode": "absolute", "steps": _steps(panel)}}
    if panel.kind == "stat":
        return {**defaults, "color": {"mode": "thresholds"}}
    lines = "line" if panel.warn is not None or panel.alarm is not None else "off"
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": lines},
    }
    return {**defaults, "color": {"mode": "palette-classic"}, "custom": custom}


def _steps(panel: Panel) -> list[Json]:
    limits = (("orange", panel.warn), ("red", panel.alarm))
    return [{"color": "green", "value": None}] + [
        {"color": colour, "value": value} for colour, value in limits if value is not None
    ]


_TIME_OPTIONS: Json = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_STAT_OPTIONS: Json = {
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto",
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
}
