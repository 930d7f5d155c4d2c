"""Null takes a value's default away: what cannot be without is refused by its name, for the rest null is nothing."""

from collections.abc import Iterator
from typing import Any

import pytest

from deploy.chart.schema import properties, values_schema
from tests.helm.rendered import CHART, EVERYTHING, RELEASE, Helm, pod_templates
from tests.helm.schemas import CORE, VERSIONS, core_trouble, pod_of


def below(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from below(f"{path}.{name}", inner)


KNOWN = dict(one for name, schema in properties().items() if name != "global" for one in below(name, schema))
OBJECTS = [path for path, schema in KNOWN.items() if "properties" in schema]
OTHERS = [path for path in KNOWN if path not in OBJECTS]
IN_OBJECTS = {f"{path}.{name}" for path in OBJECTS for name in KNOWN[path].get("required", ())}
REFUSED = IN_OBJECTS | set(values_schema()["required"])


def with_null(helm: Helm, path: str):
    given = ["--values", str(EVERYTHING), "--set", f"{path}=null"]
    return helm.run("template", RELEASE, str(CHART), "--namespace", "serving", *given)


def assert_told(result, path: str) -> None:
    assert result.returncode != 0
    assert "nil pointer" not in result.stderr
    last = [line for line in result.stderr.splitlines() if line and not line.startswith("Use --debug")][-1]
    for name in path.split("."):
        assert name in last or f"{path}:" in result.stderr, result.stderr


def test_all_objects_are_tried():
    assert {"app", "image", "hub", "head", "networkPolicy", "batch"} <= set(OBJECTS)
    assert len(OBJECTS) >= 20


@pytest.mark.parametrize("path", OBJECTS)
def test_an_object_that_is_null_is_refused_by_its_name(helm, path):
    assert_told(with_null(helm, path), path)


@pytest.mark.parametrize("path", OTHERS)
def test_a_value_that_is_null_is_refused_by_its_name_or_is_nothing(helm4, path):
    result = with_null(helm4, path)
    if result.returncode != 0:
        assert_told(result, path)


def test_what_may_be_null_is_as_if_it_were_empty(helm4):
    names = [path for path in OTHERS if path not in REFUSED and not path.startswith("app.")]
    objects = helm4.template(None, "--set", ",".join(f"{path}=null" for path in names))
    things = [one for one in objects if one["kind"] in CORE] + [pod_of(one) for one in pod_templates(objects)]
    assert things
    assert [line for one in things for line in core_trouble(one, VERSIONS[-1])] == []
