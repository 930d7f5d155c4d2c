"""Schema, defaults and table of the chart are those that their descriptions make, and say what the app says."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator
from typer.testing import CliRunner

from cluster.app_config import APP_WIDE, PER_MODEL
from cluster.config import ClusterConfig, parse_config
from deploy.chart.__main__ import CHART, OBSERVABILITY, chart_files, shipped_files, stale_files
from deploy.chart.schema import OWNED_BY_CHART, values_schema
from deploy.cli.flags import CHOICES
from engine.errors import ConfigError
from tests.helm.rendered import VALUES

SCHEMA = values_schema()
MODEL = SCHEMA["properties"]["models"]["items"]["properties"]
APP = SCHEMA["properties"]["app"]["properties"]
SETTINGS = {name: schema for name, schema in (MODEL | APP).items() if name != "workerGroup"}
# With which a bound of another setting is reached without a contradiction.
BESIDE = {
    "min_replicas": {"max_replicas": 8},
    "max_replicas": {},
    "replicas": {},
    "quantization_group_size": {"quantization": "int4"},
}
STEP = {"integer": 1, "number": 0.001}


def kind(schema):
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return next(one for one in types if one != "null")


def refused(name, value):
    """Whether the app refuses a setting's value, and for this setting."""
    try:
        parse_config({"model": "demo", **BESIDE.get(name, {}), name: value})
    except ConfigError as error:
        return error.flag == name
    return False


def test_the_files_of_the_chart_are_as_their_descriptions_make_them():
    assert stale_files(chart_files(CHART) | shipped_files(OBSERVABILITY)) == [], "run `python -m deploy.chart`"


def test_a_stale_file_is_told(tmp_path):
    for path, text in chart_files(CHART).items():
        copy = tmp_path / path.relative_to(CHART)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text)
    assert stale_files(chart_files(tmp_path)) == []
    schema = tmp_path / "values.schema.json"
    schema.write_text(schema.read_text().replace("tensor_parallel_size", "tensor_parallel"))
    assert stale_files(chart_files(tmp_path)) == [schema]


def test_the_command_writes_what_is_stale_and_only_looks_with_check(tmp_path, monkeypatch):
    import typer

    from deploy.chart.__main__ import write

    app = typer.Typer()
    app.command()(write)
    chart, shipped = tmp_path / "chart", tmp_path / "observability"
    chart.mkdir()
    shipped.mkdir()
    (chart / "README.md").write_text((CHART / "README.md").read_text())
    arguments = ["--folder", str(chart), "--observability", str(shipped)]
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 1
    assert not (chart / "values.yaml").exists()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 0
    assert (chart / "values.yaml").read_text() == (CHART / "values.yaml").read_text()
    assert (chart / "dashboards" / "engine.json").read_text() == (CHART / "dashboards" / "engine.json").read_text()
    rules = "squadron.rules.yaml"
    assert (shipped / rules).read_text() == (OBSERVABILITY / rules).read_text()


def test_every_setting_is_the_models_or_the_apps_or_the_charts():
    assert MODEL.keys() - {"workerGroup"} == set(PER_MODEL)
    assert APP.keys() | set(OWNED_BY_CHART) == set(APP_WIDE)
    assert not APP.keys() & set(OWNED_BY_CHART)
    assert MODEL.keys() | APP.keys() | set(OWNED_BY_CHART) == {f.name for f in fields(ClusterConfig)} | {
        "workerGroup"
    }


def merged(defaults, given):
    """As Helm fills values in, before it looks at the schema."""
    if not (isinstance(defaults, dict) and isinstance(given, dict)):
        return given
    return defaults | {name: merged(defaults.get(name), value) for name, value in given.items()}


def test_the_schema_is_one_and_takes_the_defaults_and_all_examples():
    Draft7Validator.check_schema(SCHEMA)
    validator = Draft7Validator(SCHEMA)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in (CHART / "values.yaml", *VALUES.values()):
        values = merged(defaults, yaml.safe_load(path.read_text()))
        assert [error.message for error in validator.iter_errors(values)] == []


@pytest.mark.parametrize("name", [name for name, schema in SETTINGS.items() if "enum" in schema])
def test_the_schema_takes_the_names_that_the_app_takes(name):
    names = [choice for choice in SETTINGS[name]["enum"] if choice is not None]
    assert names == list(CHOICES[name])
    assert not any(refused(name, choice) for choice in names if name != "ingress")
    assert refused(name, "no-such-name")


@pytest.mark.parametrize("name", [name for name, schema in SETTINGS.items() if kind(schema) in STEP])
def test_the_schema_has_the_bounds_that_the_app_has(name):
    schema = SETTINGS[name]
    step = STEP[kind(schema)]
    beyond = []
    for bound, sign in (("minimum", -1), ("maximum", 1)):
        if bound in schema:
            assert not refused(name, schema[bound])
            beyond.append(schema[bound] + sign * step)
    if "exclusiveMinimum" in schema:
        assert not refused(name, schema["exclusiveMinimum"] + step)
        beyond.append(schema["exclusiveMinimum"])
    assert all(refused(name, value) for value in beyond)
    if not beyond:
        assert not refused(name, -1)


@pytest.mark.parametrize("name", [name for name, schema in SETTINGS.items() if kind(schema) != "string"])
def test_the_app_refuses_a_text_where_the_schema_does(name):
    assert refused(name, "no such value")


def test_a_bound_above_that_of_the_app_would_be_noticed():
    assert refused("tensor_parallel_size", 0)
    assert not refused("tensor_parallel_size", 1)


def test_readme_without_marks_is_refused(tmp_path: Path):
    (tmp_path / "README.md").write_text("no table")
    with pytest.raises(ConfigError, match=r"README\.md must hold the lines"):
        chart_files(tmp_path)
