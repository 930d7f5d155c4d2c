"""The dashboards ask for figures that exist, and are what Grafana takes."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from deploy.chart.__main__ import CHART
from deploy.chart.files import DASHBOARDS
from deploy.observability.grafana import COLUMNS, SCHEMA_VERSION, Panel, Row, dashboard_text
from deploy.observability.promql import Chosen, metric
from tests.promql import bounded, filled, named, selectors, trouble
from tests.promtool import needs_promtool, promtool

BOARDS = {name: json.loads(dashboard_text(board)) for name, board in DASHBOARDS.items()}
each_board = pytest.mark.parametrize("name", DASHBOARDS)


@each_board
def test_every_query_names_figures_and_labels_that_exist(name) -> None:
    for panel in DASHBOARDS[name].panels():
        assert panel.queries, panel.title
        for query in panel.queries:
            assert named(query.expr), query.expr
            assert trouble(query.expr) == [], panel.title


@each_board
def test_every_query_is_of_what_the_viewer_chose(name) -> None:
    names = {f"${variable.name}" for variable in DASHBOARDS[name].variables}
    for panel in DASHBOARDS[name].panels():
        for query in panel.queries:
            assert set(re.findall(r"\$[a-z]\w*", query.expr)) <= names, query.expr
            for matchers in selectors(bounded(query.expr)):
                assert 'ray_io_cluster=~"$cluster"' in matchers, query.expr


@each_board
def test_all_is_chosen_until_somebody_chooses_even_where_there_is_no_such_label(name) -> None:
    """As on a local Ray: `.*` matches series without the label, too."""
    chosen = [one for one in BOARDS[name]["templating"]["list"] if one["type"] == "query"]
    assert chosen[0]["name"] == "cluster"
    for one in chosen:
        assert (one["includeAll"], one["allValue"], one["current"]["value"]) == (True, ".*", ["$__all"])


@each_board
def test_every_legend_names_labels_that_the_query_leaves(name) -> None:
    for panel in DASHBOARDS[name].panels():
        for query in panel.queries:
            for label in re.findall(r"{{(\w+)}}", query.legend):
                assert re.search(rf"by \([^)]*\b{label}\b", query.expr), query


@each_board
def test_every_panel_says_what_it_is(name) -> None:
    for panel in DASHBOARDS[name].panels():
        assert panel.description.endswith("."), panel.title
        assert panel.unit, panel.title
        legends = [query.legend for query in panel.queries]
        assert len(set(legends)) == len(legends), panel.title


@each_board
def test_panels_stand_beside_and_below_each_other(name) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert all(x < COLUMNS for x, _ in cells)
        taken |= cells
    assert len(taken) == COLUMNS * len({y for _, y in taken}), "no holes between panels"


@each_board
def test_grafana_finds_all_that_it_asks_for(name) -> None:
    board = BOARDS[name]
    assert board["schemaVersion"] == SCHEMA_VERSION
    assert board["uid"] == f"squadron-{name}"
    numbers = [panel["id"] for panel in board["panels"]]
    assert numbers == list(range(1, len(numbers) + 1))
    sources = [one for panel in board["panels"] for one in panel.get("targets", [])]
    assert all(one["datasource"]["uid"] == "${datasource}" for one in sources)
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {"cluster", "model_name"} <= variables.keys()
    assert ("replica" in variables) == (name == "engine")


@each_board
def test_variables_are_asked_of_figures_that_exist(name) -> None:
    for variable in DASHBOARDS[name].variables:
        assert trouble(variable.metric) == []


@each_board
def test_the_shipped_file_is_the_one_that_the_table_makes(name) -> None:
    shipped = (CHART / "dashboards" / f"{name}.json").read_text(encoding="utf-8")
    assert shipped == dashboard_text(DASHBOARDS[name]), "run `python -m deploy.chart`"


def test_a_row_of_many_panels_goes_on_below() -> None:
    from deploy.observability.grafana import places

    panel = Panel("a", "s", "b.", ())
    six = places(Row("row", (panel,) * 6))
    assert [(one["x"], one["y"], one["w"]) for one in six] == [
        *((0, 0, 8), (8, 0, 8), (16, 0, 8)),
        *((0, 8, 8), (8, 8, 8), (16, 8, 8)),
    ]
    assert {one["w"] for one in places(Row("row", (panel,) * 3))} == {8}


def test_figures_that_nobody_makes_are_noticed() -> None:
    assert trouble("rate(ray_squadron_no_such_total[1m])") == ["no figure ray_squadron_no_such_total"]
    assert trouble("sum by (tenant) (ray_squadron_requests_live)") == [
        "ray_squadron_requests_live has no label tenant"
    ]
    assert trouble('ray_squadron_requests_live{replica="a"}') == ["ray_squadron_requests_live has no label replica"]
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        trouble("sum by (")


def test_a_query_cannot_be_made_of_a_name_that_the_table_lacks() -> None:
    with pytest.raises(KeyError):
        Chosen(by_replica=True).rate("no_such")
    with pytest.raises(ValueError, match="give it a suffix"):
        metric("step_seconds")
    with pytest.raises(ValueError, match="give it no suffix"):
        metric("requests_live", "_bucket")


@needs_promtool
def test_replicas_count_once_however_many_routers_tell_of_them(tmp_path) -> None:
    """Two routers each in two clusters with the same two models, and a local Ray: 3 + 1 + 2 + 1 + 4 are ready."""
    told = {("a", "m"): 3, ("a", "n"): 1, ("b", "m"): 2, ("b", "n"): 1, ("", "m"): 4}
    series = []
    for (cluster, model), ready in told.items():
        for router in ("x", "y"):
            place = f'ray_io_cluster="{cluster}",' if cluster else ""
            labels = f'{place}model_name="{model}",router="{cluster}{router}",state='
            series.append((f'{labels}"ready"', ready))
    tests = {
        "interval": "1m",
        "input_series": [{"series": f"ray_squadron_replicas{{{one}}}", "values": f"{n}x5"} for one, n in series],
        "promql_expr_test": [
            _shows("Replicas ready", ".*", {"{}": 11}),
            _shows("Replicas ready", "b", {"{}": 3}),
            _shows("Replicas", "a|b", {_ready("m"): 5, _ready("n"): 2}),
        ],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": [tests]}))
    assert "SUCCESS" in promtool("test", "rules", file)


def _ready(model):
    return f'{{model_name="{model}",state="ready"}}'


def _shows(title, clusters, samples):
    """What promtool should find for the first query of a panel."""
    (panel,) = (one for one in DASHBOARDS["service"].panels() if one.title == title)
    expr = filled(panel.queries[0].expr.replace("$cluster", clusters))
    expected = [{"labels": labels, "value": value} for labels, value in samples.items()]
    return {"expr": expr, "eval_time": "3m", "exp_samples": expected}
