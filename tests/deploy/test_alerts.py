"""Alerts ask for figures that exist, fire when they must and not otherwise, and tell the next command."""

from __future__ import annotations

import re

import pytest
import yaml

from cluster.app import BATCHES, ROUTER
from cluster.resources import ONE
from cluster.wire.link import ENDS, PEER_ALIVE
from deploy.chart.__main__ import CHART, OBSERVABILITY
from deploy.observability.alerts import (
    DEPLOYMENTS,
    EVERYTHING,
    NAMESPACE_MARK,
    RAYSERVICE_MARK,
    RELEASE,
    TTFT_MARK,
    alerts,
    rules_text,
)
from tests.deploy.alert_cases import (
    CASES,
    MINUTES,
    at_night,
    copies,
    deployment_status,
    dies,
    failed_starts,
    first_tokens,
    lost,
    moves,
)
from tests.promql import named, selectors, trouble
from tests.promtool import needs_promtool, promtool

ALERTS = {alert.name: alert for alert in alerts()}
OTHERS = (  # clusters and namespaces beside the release llm in the namespace serving
    ("llm-two-x7k2p", "serving"),
    ("other-llm-x7k2p", "serving"),
    ("llm-batch-1a2b3-x7k2p", "serving"),
    ("llm-x7k2p", "elsewhere"),
    ("", ""),
)
RULES = OBSERVABILITY / "squadron.rules.yaml"


def test_every_alert_names_figures_and_labels_that_exist() -> None:
    for alert in ALERTS.values():
        assert named(alert.expr), alert.name
        assert trouble(alert.expr) == [], alert.name


def test_every_alert_tells_the_next_command() -> None:
    commands = r"`squadron (status|why|doctor|top|plan)\b"
    for alert in ALERTS.values():
        assert re.search(rf"Next: .*{commands}", alert.description), alert.name
        assert alert.description.endswith("."), alert.name


def test_every_label_of_a_summary_is_one_that_the_expression_leaves() -> None:
    for alert in ALERTS.values():
        for label in re.findall(r"\$labels\.(\w+)", alert.summary + alert.description):
            assert re.search(rf"by \([^)]*\b{label}\b", alert.expr), alert.name


def test_links_that_healthy_replicas_end_are_no_deaths() -> None:
    """Such as those of a router that was held up: `silent` is what replicas say of it."""
    matched = re.search(r'reason=~"([^"]*)"', ALERTS["SquadronCrashLoop"].expr)
    assert matched is not None
    assert {*matched[1].split("|")} == {*ENDS} - PEER_ALIVE


def test_all_deployments_of_an_app_are_watched() -> None:
    matched = re.search(r'"(.*)"', DEPLOYMENTS)
    assert matched is not None
    for name in (ROUTER, BATCHES, ONE, f"{ONE}-qwen3-8b"):
        assert re.fullmatch(matched[1], name), name


def test_names_are_unique_and_each_alert_has_a_case() -> None:
    assert len(ALERTS) == len(alerts())
    assert CASES.keys() == ALERTS.keys()


def test_the_page_on_operations_has_every_alert() -> None:
    page = (OBSERVABILITY.parents[1] / "docs" / "guides" / "operations.md").read_text(encoding="utf-8")
    for alert in ALERTS.values():
        lasting = "at once" if alert.lasting == "0m" else alert.lasting
        assert f"| `{alert.name}` | {lasting} | {alert.severity} |" in page


def test_the_charts_rules_have_a_mark_where_its_value_goes() -> None:
    text = (CHART / "alerts" / RULES.name).read_text(encoding="utf-8")
    assert text.count(TTFT_MARK) == 2
    assert TTFT_MARK not in RULES.read_text(encoding="utf-8")
    (rule,) = (one for one in yaml.safe_load(text)["groups"][0]["rules"] if TTFT_MARK in one["expr"])
    assert rule["alert"] == "SquadronSlowFirstToken"


def test_every_selector_of_the_charts_rules_is_of_its_release_and_none_of_the_shipped_ones() -> None:
    for confined, shipped in zip(alerts(scope=RELEASE), alerts(), strict=True):
        assert all(one >= {*RELEASE.matchers} for one in selectors(confined.expr)), confined.name
        assert all("ray_io_cluster" not in " ".join(one) for one in selectors(shipped.expr)), shipped.name
        assert [one - {*RELEASE.matchers} for one in selectors(confined.expr)] == selectors(shipped.expr)


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", RULES)


@needs_promtool
def test_each_alert_fires_when_it_must_and_not_otherwise(tmp_path) -> None:
    tests = []
    for name, case in CASES.items():
        tests += [_test(name, case.fires, MINUTES - 5, 1), _test(name, case.quiet, MINUTES - 5, 0)]
        if case.early:
            tests.append(_test(name, case.fires, case.early, 0))
    assert "SUCCESS" in _run(tmp_path, tests)


@needs_promtool
@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("SquadronMigrationStorm", moves(5, 100) | lost("lost", 0.5)),
        ("SquadronMigrationStorm", moves(1, 0) | lost("lost", 0.5)),
        ("SquadronMigrationStorm", moves(0.2, 0.5) | lost("lost", 0.5)),
        ("SquadronHighErrorShare", at_night("internal_error", 25, 28, 31, 34)),
        ("SquadronDeadlineMisses", at_night("deadline_exceeded", 25, 28, 31, 34)),
        ("SquadronSlowFirstToken", first_tokens(0, 1)),
        ("SquadronRouterLost", {name: v for name, v in copies("Router", 2, 0).items() if "target" in name}),
        ("SquadronDeploymentFailed", deployment_status(2, "Summarizer")),
        ("SquadronCrashLoop", dies(24, 28, 31)),
        ("SquadronCrashLoop", failed_starts(2)),
    ],
    ids=[
        "few move",
        "nothing comes that they could be a share of",
        "three move of seven",
        "four fail at night",
        "four are late at night",
        "few first tokens, all slow",
        "routers that have never started",
        "another app on the same Ray",
        "some deaths",
        "some failed starts",
    ],
)
def test_what_is_near_an_alert_and_none(tmp_path, name, series) -> None:
    assert "SUCCESS" in _run(tmp_path, [_test(name, series, MINUTES - 5, 0)])


def test_what_is_a_share_has_a_floor_that_the_alert_tells() -> None:
    shares = [alert for alert in ALERTS.values() if " / " in alert.expr or "histogram_quantile" in alert.expr]
    assert len(shares) == 4
    for alert in shares:
        floor = re.search(r"\[(\w+)\]\)\) >= (\d+)$", alert.expr)
        assert floor is not None, alert.name
        within, number = floor.groups()
        assert re.search(rf"{number} .*within {within}", alert.description), alert.name


@needs_promtool
def test_five_of_few_that_fail_are_too_many(tmp_path) -> None:
    series = at_night("internal_error", 20, 22, 24, 26, 29, 31)
    assert "SUCCESS" in _run(tmp_path, [_test("SquadronHighErrorShare", series, MINUTES - 5, 1)])


@needs_promtool
def test_starts_that_fail_are_a_crash_loop_though_nobody_had_a_link_to_them(tmp_path) -> None:
    assert "SUCCESS" in _run(tmp_path, [_test("SquadronCrashLoop", failed_starts(3), MINUTES - 5, 1)])


@needs_promtool
@pytest.mark.parametrize("cluster", ["llm-x7k2p", "llm-raycluster-x7k2p"])
def test_the_charts_alerts_fire_for_the_clusters_of_the_release(tmp_path, cluster) -> None:
    tests = [_test(name, _placed(case.fires, cluster, "serving"), MINUTES - 5, 1) for name, case in CASES.items()]
    assert "SUCCESS" in _run(tmp_path, tests, RELEASE)


@needs_promtool
def test_the_charts_alerts_are_quiet_about_all_other_clusters(tmp_path) -> None:
    tests = []
    for name, case in CASES.items():
        # The others' figures are no sign of life.
        series = case.quiet if name == "SquadronSilent" else case.fires
        around = {one: values for place in OTHERS for one, values in _placed(series, *place).items()}
        tests.append(_test(name, around, MINUTES - 5, int(name == "SquadronSilent")))
    assert "SUCCESS" in _run(tmp_path, tests, RELEASE)


@needs_promtool
def test_a_releases_alerts_say_whose_they_are(tmp_path) -> None:
    alert = ALERTS["SquadronSilent"]
    expected = {
        "exp_labels": {"severity": "critical", "namespace": "serving", "ray_service": "llm"},
        "exp_annotations": {"summary": alert.summary, "description": alert.description},
    }
    test = _test(alert.name, CASES[alert.name].fires, MINUTES - 5, 1)
    test["alert_rule_test"] = [{"eval_time": "30m", "alertname": alert.name, "exp_alerts": [expected]}]
    assert "SUCCESS" in _run(tmp_path, [test], RELEASE)


@needs_promtool
def test_an_alert_that_does_not_fire_is_noticed(tmp_path) -> None:
    with pytest.raises(AssertionError, match="FAILED"):
        _run(tmp_path, [_test("SquadronQueueOld", CASES["SquadronQueueOld"].quiet, MINUTES - 5, 1)])


@needs_promtool
def test_a_fired_alert_reads_well(tmp_path) -> None:
    alert = ALERTS["SquadronHighErrorShare"]
    expected = {
        "exp_labels": {"severity": "critical", "ray_io_cluster": "c", "model_name": "m"},
        "exp_annotations": {
            "summary": "10% of the requests for m end in errors",
            "description": alert.description,
        },
    }
    test = _test(alert.name, CASES[alert.name].fires, MINUTES - 5, 1)
    test["alert_rule_test"] = [{"eval_time": "30m", "alertname": alert.name, "exp_alerts": [expected]}]
    assert "SUCCESS" in _run(tmp_path, [test])


def _test(name, series, minute, firing):
    """One test of promtool: the figures, and how many series of the alert fire at a minute."""
    samples = [{"labels": "{}", "value": 1}] if firing else []
    expr = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
    return {
        "name": f"{name} {'fires' if firing else 'is quiet'} after {minute} minutes",
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples}],
    }


def _placed(series, cluster, namespace):
    """Figures as the PodMonitor labels them, of another cluster than the cases' own."""
    place = f'ray_io_cluster="{cluster}",namespace="{namespace}"'
    return {one.replace('ray_io_cluster="c"', place): values for one, values in series.items()}


def _run(folder, tests, scope=EVERYTHING):
    text = rules_text("rules", "2", scope).replace(RAYSERVICE_MARK, "llm").replace(NAMESPACE_MARK, "serving")
    (folder / RULES.name).write_text(text)
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [RULES.name], "evaluation_interval": "1m", "tests": tests}))
    return promtool("test", "rules", file)
