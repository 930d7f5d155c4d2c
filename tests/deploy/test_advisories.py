"""The check of pinned packages against known holes: found, none, and nobody to ask are three things."""

from __future__ import annotations

import json

import httpx
import pytest

from tests import advisories as module
from tests.advisories import PINNED, NobodyToAskError, advisories, main, pinned

HOLES = {("jinja2", "2.4.1"): ["GHSA-462w-v97r-4m45", "PYSEC-2019-217"]}


def osv(request: httpx.Request) -> httpx.Response:
    """OSV, as its documentation has it: an empty object where nothing is known."""
    queries = json.loads(request.content)["queries"]
    assert {query["package"]["ecosystem"] for query in queries} == {"PyPI"}
    known = [HOLES.get((query["package"]["name"], query["version"])) for query in queries]
    told = [[{"id": one, "modified": "2024-01-01T00:00:00Z"} for one in ids or ()] for ids in known]
    results = [{"vulns": vulns} if vulns else {} for vulns in told]
    return httpx.Response(200, json={"results": results})


def asking(answer) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def unreachable(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("no route to host", request=request)


def test_a_hole_is_told_with_its_package(monkeypatch) -> None:
    found = advisories([("jinja2", "2.4.1"), ("httpx", "0.28.1")], asking(osv))
    assert found == {"jinja2==2.4.1": ["GHSA-462w-v97r-4m45", "PYSEC-2019-217"]}
    monkeypatch.setattr(module, "ACCEPTED", {"PYSEC-2019-217": "we render no template of others with it"})
    assert advisories([("jinja2", "2.4.1")], asking(osv)) == {"jinja2==2.4.1": ["GHSA-462w-v97r-4m45"]}


@pytest.mark.parametrize(
    "answer",
    [
        unreachable,
        lambda _: httpx.Response(403, text="no"),
        lambda _: httpx.Response(200, text="<html>"),
        lambda _: httpx.Response(200, json=[]),
        lambda _: httpx.Response(200, json={"results": []}),
    ],
    ids=["unreachable", "forbidden", "a page", "a list", "too few"],
)
def test_no_answer_is_not_taken_for_none_known(answer, capsys) -> None:
    with pytest.raises(NobodyToAskError):
        advisories([("jinja2", "2.4.1")], asking(answer))
    assert main(asking(answer)) == 0
    assert "NOT CHECKED" in capsys.readouterr().out


def test_the_command_fails_where_one_is_known(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(module, "PINNED", tmp_path / "constraints.txt")
    module.PINNED.write_text("jinja2==2.4.1\nhttpx==0.28.1\n")
    assert main(asking(osv)) == 1
    out = capsys.readouterr().out
    assert "https://osv.dev/vulnerability/GHSA-462w-v97r-4m45" in out
    assert "2 packages asked for, 1 with a known hole" in out
    module.PINNED.write_text("httpx==0.28.1\n")
    assert main(asking(osv)) == 0
    assert "NOT CHECKED" not in capsys.readouterr().out


def test_all_that_is_pinned_is_asked_for() -> None:
    found = pinned(PINNED.read_text())
    lines = [line for line in PINNED.read_text().splitlines() if line and not line.startswith("#")]
    assert len(found) == len(lines) > 100
    assert pinned("torch==2.13.0+cpu ; python_version > '3.10'\n# why\n") == [("torch", "2.13.0")]
    with pytest.raises(ValueError, match=r"'torch>=2' pins no version"):
        pinned("torch>=2")
