"""The table of faults names tests that exist and leaves no scenario out; no code of ours unpickles or evaluates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "design" / "faults.md").read_text(encoding="utf-8")
SCENARIOS = 44
HOLES = 22
REASON = re.compile(r"none(?: that \w+ \w+)?: \w+.{20,}")  # "none: why", "none that sends packets: why"
FORBIDDEN = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
EVALUATES = {"eval", "exec", "__import__"}


@cache
def collected(path: Path) -> frozenset[str]:
    """Return the names of the functions that pytest collects from a file."""
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(name for name in functions if name.startswith("test_"))


def rows(table: str) -> list[tuple[str, str]]:
    """Return what each row is about (a scenario's number, or a hole) and its last cell."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return [(row[0], row[-1]) for row in cells if row[0].strip("-") not in ("", "Hole")]


def problems(title: str, cell: str) -> list[str]:
    """Return what is wrong with a row: a test that is not there, or neither a test nor the reason why none."""
    named = [name for name in re.findall(r"`([^`]*)`", cell) if "::" in name]
    if not named and not REASON.match(cell):
        return [f"{title}: neither a test nor 'none:' with the reason"]
    parts = [name.partition("::") for name in named]
    return [f"{title}: no {file}::{test}" for file, _, test in parts if test not in collected(ROOT / "tests" / file)]


@pytest.mark.parametrize(("title", "cell"), [pytest.param(*row, id=row[0].replace(" ", "-")) for row in rows(TABLE)])
def test_every_row_names_tests_that_exist_or_the_reason_why_none(title: str, cell: str) -> None:
    assert not problems(title, cell)


def test_no_scenario_and_no_hole_is_left_out() -> None:
    titles = [title for title, _ in rows(TABLE)]
    assert [int(title) for title in titles if title.isdigit()] == list(range(1, SCENARIOS + 1))
    assert len([title for title in titles if not title.isdigit()]) == HOLES


def test_every_test_that_is_named_stands_in_a_row() -> None:
    """Elsewhere, or spelled in another way, nobody would look whether it exists."""
    in_rows = sum(cell.count("::test_") for _, cell in rows(TABLE))
    assert in_rows == TABLE.count("::test_") > SCENARIOS


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "none",
        "none: soon",
        "skipped where none can be made",
        "`chaos/test_kills.py`",
        "`chaos/test_kills.py::test_that_is_not_there`",
        "`chaos/test_kills.py::stream_all`",
        "`chaos/test_nowhere.py::test_every_stream_survives_a_kill_token_exact`",
        "`tests/chaos/test_kills.py::test_every_stream_survives_a_kill_token_exact`",
        "none: batch inference comes much later, see `unit/test_batch.py::test_ten_points`",
    ],
)
def test_a_row_without_a_test_or_with_one_that_is_not_there_is_seen(cell: str) -> None:
    ((title, last),) = rows(f"| | Fault | Test |\n| --- | --- | --- |\n| 1 | kill -9 | {cell} |\n")
    assert problems(title, last)


def python_files() -> list[Path]:
    return [path for room in ("parallel", "engine", "cluster", "deploy") for path in (ROOT / room).rglob("*.py")]


def test_nothing_of_ours_unpickles_or_evaluates() -> None:
    files = python_files()
    assert len(files) > 100
    assert not [f"{path}:{found}" for path in files for found in dangers(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as p",
        "import ray.cloudpickle",
        "from ray import cloudpickle",
        "from ray.cloudpickle import loads",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('pickle')",
        "eval('1')",
        "import builtins\nbuiltins.eval('1')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch import load\nload('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "torch.distributed.broadcast_object_list([], 0)",
        "connection.recv()",
    ],
)
def test_what_unpickles_or_evaluates_is_seen(code: str) -> None:
    assert list(dangers(code))


@pytest.mark.parametrize(
    "code", ["import torch\ntorch.load('x', weights_only=True)", "model.eval()", "c.recv_bytes()"]
)
def test_what_does_not_is_let_pass(code: str) -> None:
    assert not list(dangers(code))


def dangers(source: str) -> Iterator[str]:
    """Yield what a module does that could run what a message or a file brings, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            told = [f"imports {name}" for name in _imported(node) if FORBIDDEN & set(name.split("."))]
            told += ["imports torch.load"] if "torch.load" in _imported(node) else []
        elif isinstance(node, ast.Call):
            told = _called(node)
        else:
            continue
        yield from (f"{node.lineno} {what}" for what in told)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module or ''}.{alias.name}" for alias in node.names]


def _called(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    given = {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
    found = {
        f"calls {name}": name.removeprefix("builtins.") in EVALUATES,
        "imports by name what unpickles": name.endswith("import_module") and bool(FORBIDDEN & given),
        "calls torch.load without weights_only=True": name == "torch.load" and words.get("weights_only") != "True",
        "allows pickles in arrays": words.get("allow_pickle", "False") != "False",
        f"calls {name}, which pickles": name.endswith(("_object_list", ".recv")) and _pickles(name, call),
    }
    return [what for what, true in found.items() if true]


def _pickles(name: str, call: ast.Call) -> bool:
    """Whether it unpickles: a socket's `recv` takes a size, that of a `multiprocessing` connection does not."""
    return not call.args if name.endswith(".recv") else "distributed" in name or "dist." in name
