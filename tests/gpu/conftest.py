"""What the tests of a GPU say of the machine, how long each may take, and that it has its memory back afterwards."""

from __future__ import annotations

import faulthandler
import gc
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.bench.gpu.machine import machine
from tests.gpu.outcomes import Recorder

LIMIT = (
    300.0  # seconds of a test with its fixtures and all that is compiled for it; `@pytest.mark.limit` gives others
)
# Bytes that may stay allocated after a test: what libraries keep for each stream. A file's tests leave next to none.
LEFT_BY_TEST, LEFT_BY_FILE = 256 << 20, 64 << 20
HERE = Path(__file__).parent
LAST = "test_footprint.py"  # takes nearly all memory
STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "add a line of JSON for each test that begins or ends; what passed, by this file, is not run again"
    parser.addoption("--outcomes", type=Path, metavar="FILE", help=told)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # the true one: pytest catches what tests say
    path = config.getoption("outcomes", None)
    if path is not None:
        config.pluginmanager.register(Recorder(path))


def pytest_report_header() -> str:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    found = machine(device)
    facts = {"gpu": found.get("gpu", "none"), **found["versions"], **found.get("clocks", {})}
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path == HERE / LAST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process, all stacks told, where a test takes too long: nothing else ends a wait for a hung GPU.

    pytest asks the hook of a conftest for the tests of all folders. Those of others have it only by `-p`.
    """
    asked_for = item.config.pluginmanager.has_plugin("tests.gpu.conftest")
    if not asked_for and not item.path.is_relative_to(HERE):
        return (yield)
    mark = item.get_closest_marker("limit")
    seconds = mark.args[0] if mark else LIMIT
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Let go of what the frames of a failed test hold: pytest keeps its traceback until the next one fails."""
    report = yield
    if call.excinfo is not None and not item.config.getoption("usepdb"):
        traceback.clear_frames(call.excinfo.tb)
        for frame, _ in traceback.walk_tb(call.excinfo.tb):
            frame.f_locals  # noqa: B018  up to Python 3.12 it is a copy, taken by who told the failure: made anew
    return report


@pytest.fixture(scope="module", autouse=True)
def gpu_of_a_file() -> Iterator[None]:
    """The GPU's memory is free after the last test of a file."""
    before = allocated()
    yield
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # no graph that could use them is left
    refuse_more_than(before + LEFT_BY_FILE)


@pytest.fixture(autouse=True)
def gpu_of_a_test() -> Iterator[None]:
    """A test that took more than its file's fixtures gives it back, to the driver as well: the next one finds it."""
    before = allocated()
    yield
    refuse_more_than(before + LEFT_BY_TEST)


def allocated() -> int:
    """Return the bytes that are held of the first GPU, after what nobody holds was given back."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(0)


def refuse_more_than(allowed: int) -> None:
    """Fail where more than `allowed` bytes are held."""
    if (held := allocated()) > allowed:
        pytest.fail(
            f"holds {held >> 20} MiB of the GPU that are not given back, at most {allowed >> 20}", pytrace=False
        )
