"""The table of faults names tests that exist and leaves no scenario out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(\w+/test_\w+\.py)::(\w+)`", TABLE)))
SCENARIOS = 43
FORBIDDEN = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
EVALUATES = {"eval", "exec"}


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_the_table_names_exists(file: str) -> None:
    missing = {name for where, name in NAMED if where == file} - functions_in(ROOT / "tests" / file)
    assert not missing


def test_every_scenario_has_a_row_with_a_test_or_the_reason_why_none() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)$", TABLE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, SCENARIOS + 1))
    assert all("::test_" in row or "none" in row for _, row in rows)


def test_nothing_of_ours_unpickles_or_evaluates() -> None:
    found = []
    for path in [
        path for room in ("parallel", "engine", "cluster", "deploy") for path in (ROOT / room).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EVALUATES:
                found.append(f"{path}:{node.lineno} calls {node.func.id}")
            elif isinstance(node, ast.Call) and _loads_any_object(node):
                found.append(f"{path}:{node.lineno} calls torch.load without weights_only=True")
            found += [f"{path}:{node.lineno} imports {name}" for name in names if name.split(".")[0] in FORBIDDEN]
    assert not found


def _loads_any_object(call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "load"):
        return False
    module = call.func.value
    safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)
    return isinstance(module, ast.Name) and module.id == "torch" and not safe
