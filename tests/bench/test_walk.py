"""The house is counted and the walks are walked as `tests.bench.walk` says."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.house import count_house
from tests.bench.walk import Walk, house_tables, told, walk_chat, walk_decode, walk_table

LONG = "class Big:\n    def long(self):\n" + "        self.x = 1\n" * 50
FITS = "def fits():\n" + "    print()\n" * 49
TREE = {
    "engine/__init__.py": "from engine.core import Core\n",
    "engine/core.py": "import os\nfrom engine.models import deep\nclass Core: pass\n",
    "engine/models/__init__.py": "",
    "engine/models/deep.py": "from ..helper import one\n" + "# more\n" * 70,
    "engine/helper.py": "def one():\n    import engine.core\n    return engine.core\n",
    "parallel/group.py": LONG + FITS,
    "cluster/a.py": "from cluster import b\n",
    "cluster/b.py": "from cluster.c import last\n",
    "cluster/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cluster.a import b\nlast = 1\n",
    "cluster/one/x.py": "from cluster.two import y\n",
    "cluster/two/y.py": "try:\n    import cluster.one.z\nexcept ImportError:\n    pass\n",
    "cluster/one/z.py": "import engine\n",
    "cluster/one/made_pb2.py": "import cluster.a\n",
    "deploy/cli.py": "import cluster.a\n",
    "tests/not_ours.py": "import deploy.cli\n",
}
OTHERS = ("cluster/one/made_pb2.py", "tests/not_ours.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_files_lines_and_long_functions_are_counted(tree):
    found = count_house(tree)
    assert (found["files"], found["generated_files"]) == (13, 1)
    assert found["lines"] == sum(text.count("\n") for path, text in TREE.items() if path not in OTHERS)
    assert found["files_by_room"] == {"cluster": 6, "deploy": 1, "engine": 5, "parallel": 1}
    assert found["files_by_folder"]["cluster"] == 3
    assert found["files_under_60_lines"] == 11, "all but two"
    assert found["long_functions"] == {"parallel/group.py:Big.long": 51}, "50 lines are not over 50"


def test_circles_of_files_are_found_apart_by_where_their_imports_stand(tree):
    found = count_house(tree)
    of_engine = ["engine/core.py", "engine/helper.py", "engine/models/deep.py"]
    of_types = ["cluster/a.py", "cluster/b.py", "cluster/c.py"]
    assert found["imports"] == {"at import": 9, "inside functions": 1, "under TYPE_CHECKING": 1}
    assert found["file_circles"] == {
        "at import": [],
        "or inside functions": [of_engine],
        "or under TYPE_CHECKING": [of_types, of_engine],
    }


def test_folders_that_import_each_other_are_a_circle_though_their_files_are_none(tree):
    found = count_house(tree)["package_circles"]
    assert found["cluster"]["without_it"]["at import"] == [["cluster/one", "cluster/two"]]
    assert found["engine"]["with_the_room"]["at import"] == [["engine", "engine/models"]]
    assert found["engine"]["without_it"]["or under TYPE_CHECKING"] == []
    assert found["engine"]["pairs"] == [("engine", "engine/models")]


def test_a_walk_lists_files_in_the_order_of_their_first_call_on_every_thread(tmp_path):
    texts = {
        "deploy/start.py": "def start(then):\n    then()\n    then()\n",
        "engine/last.py": "def last(): pass\n",
        "tests/toy.py": "def toy(then): then()\n",
        "cluster/made_pb2.py": "def made(): pass\n",
    }
    made = {path: _loaded(tmp_path, path, text) for path, text in texts.items()}

    def on_another_thread():
        thread = threading.Thread(target=made["engine/last.py"].last)
        thread.start()
        thread.join()

    walk = Walk(tmp_path)
    with walk.hooked():
        made["engine/last.py"].last()
        walk.begin()
        made["tests/toy.py"].toy(made["cluster/made_pb2.py"].made)
        made["deploy/start.py"].start(on_another_thread)
        calls = walk.end()
        made["engine/last.py"].last()
    assert list(calls.items()) == [("deploy/start.py", 1), ("engine/last.py", 2)]


def _loaded(root: Path, path: str, text: str):
    file = root / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_decode_step_walks_through_the_engine_and_its_layers():
    walk = told(walk_decode())
    assert next(iter(walk["rest"])) == "engine/core.py", "the step begins there"
    assert {"engine/scheduler/scheduler.py", "engine/worker/local_executor.py"} <= walk["rest"].keys()
    assert "engine/kv/block_manager.py" in walk["rest"], "a block is filled"
    assert {"engine/models/decoder.py", "parallel/linear.py"} <= walk["layers"].keys()
    assert walk["files"] == walk["files_of_rest"] + walk["files_of_layers"]
    assert sum(walk["files_by_folder"].values()) == walk["files"]


def test_a_chat_request_walks_from_the_gate_to_the_engine():
    walk = told(asyncio.run(walk_chat()))
    order = [
        "cluster/http/gate.py",
        "cluster/openai/validation.py",
        "cluster/admission/admission_queue.py",
        "cluster/router/placement.py",
        "cluster/wire/codec.py",
        "cluster/replica/core.py",
        "engine/scheduler/admission.py",
        "engine/worker/runner.py",
    ]  # none of which a timer calls
    assert [path for path in walk["rest"] if path in order] == order


def test_the_tables_hold_what_is_measured(tree):
    house = count_house(tree)
    walk = told({"engine/core.py": 3, "engine/models/decoder.py": 1234})
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*house_tables(house), walk_table("decode", walk))
    shown = console.export_text()
    for words in ("Big.long", "cluster/one and cluster/two", "2 files, 1 of layers", "1,234"):
        assert words in shown
    assert json.loads(json.dumps(house))["files"] == 13
