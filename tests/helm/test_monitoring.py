"""Dashboards and alerts in the chart: what Grafana's sidecar and Prometheus' operator are given."""

import json
import re

import yaml

from deploy.chart.files import DASHBOARDS, HEAD
from deploy.observability.alerts import NAMESPACE_MARK, RAYSERVICE_MARK, RELEASE, TTFT_SECONDS, alerts, rules_text
from tests.helm.rendered import CHART, EXAMPLES, of_kind, rendered
from tests.promql import selectors
from tests.promtool import needs_promtool, promtool


def expected_rules(ttft, name, namespace):
    text = rules_text(HEAD, ttft, RELEASE)
    return yaml.safe_load(text.replace(RAYSERVICE_MARK, name).replace(NAMESPACE_MARK, namespace))


def dashboards(name):
    return [one for one in of_kind(rendered(name), "ConfigMap") if "-dashboard-" in one["metadata"]["name"]]


def test_neither_is_there_unless_asked_for(helm4):
    assert dashboards("laptop") == []
    assert of_kind(rendered("laptop"), "PrometheusRule") == []


def test_each_dashboard_is_a_config_map_that_the_sidecar_finds(helm4):
    found = {one["metadata"]["name"]: one for one in dashboards("everything")}
    assert found.keys() == {f"everything-dashboard-{name}" for name in DASHBOARDS}
    for name in DASHBOARDS:
        metadata = found[f"everything-dashboard-{name}"]["metadata"]
        assert metadata["labels"]["grafana_dashboard"] == "yes"
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "squadron"
        assert metadata["annotations"] == {"grafana_folder": "Squadron"}


def test_a_dashboard_in_the_chart_is_the_shipped_one(helm4):
    for one in dashboards("everything"):
        ((file, text),) = one["data"].items()
        shipped = CHART / "dashboards" / file.removeprefix("squadron-")
        assert json.loads(text) == json.loads(shipped.read_text(encoding="utf-8"))


def test_the_label_is_grafanas_own_unless_another_is_asked_for(helm4):
    found = of_kind(helm4.template(None, "--set", "dashboards.enabled=true"), "ConfigMap")
    labels = [
        one["metadata"]["labels"].get("grafana_dashboard") for one in found if "dashboard" in one["metadata"]["name"]
    ]
    assert labels == ["1"] * len(DASHBOARDS)


def test_the_rules_are_all_alerts_with_the_target_of_the_values(helm4):
    (rule,) = of_kind(rendered("everything"), "PrometheusRule")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == expected_rules("0.5", "everything", "serving")


def test_without_a_target_it_is_that_of_the_shipped_rules(helm4):
    (rule,) = of_kind(helm4.template(None, "--set", "prometheusRule.enabled=true"), "PrometheusRule")
    assert rule["spec"] == expected_rules(f"{TTFT_SECONDS:g}", "llm-squadron", "serving")


def test_the_rules_look_at_the_clusters_of_the_rendered_service_by_labels_of_the_pod_monitor(helm4):
    objects = rendered("everything")
    (service,), (monitor,) = of_kind(objects, "RayService"), of_kind(objects, "PodMonitor")
    assert "ray.io/cluster" in monitor["spec"]["podTargetLabels"]  # Prometheus' operator calls it ray_io_cluster
    (rule,) = of_kind(objects, "PrometheusRule")
    for one in rule["spec"]["groups"][0]["rules"]:
        for matchers in selectors(one["expr"]):
            (cluster,) = (re.fullmatch(r'ray_io_cluster=~"(.*)"', one) for one in matchers if "cluster=" in one)
            assert re.fullmatch(cluster[1], f"{service['metadata']['name']}-x7k2p")
            assert f'namespace="{service["metadata"]["namespace"]}"' in matchers


def test_a_namespace_of_digits_stays_a_word(helm4):
    values = ("--namespace", "123", "--set", "prometheusRule.enabled=true")
    (rule,) = of_kind(helm4.template(None, *values), "PrometheusRule")
    assert {one["labels"]["namespace"] for one in rule["spec"]["groups"][0]["rules"]} == {"123"}


def test_alerts_without_a_service_are_refused(helm4):
    given = ("--values", str(EXAMPLES["batch"]), "--set", "prometheusRule.enabled=true")
    result = helm4.run("template", "llm", str(CHART), *given)
    assert result.returncode != 0
    assert "prometheusRule.enabled: alerts are of the service" in result.stderr


def test_a_target_of_no_time_is_refused(helm4):
    result = helm4.run("template", "llm", str(CHART), "--set", "prometheusRule.ttftSeconds=0")
    assert result.returncode != 0
    assert "ttftSeconds" in result.stderr


@needs_promtool
def test_promtool_takes_the_rules_of_the_chart(helm4, tmp_path):
    (rule,) = of_kind(rendered("everything"), "PrometheusRule")
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    assert f"SUCCESS: {len(alerts())} rules found" in promtool("check", "rules", file)
