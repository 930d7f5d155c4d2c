"""The bench of the start says what it saw: each side's least and median, and each process under a name of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.bench.serve_start import COMMAND, Start, Watch, _process_name, _stamp_of, table


def test_a_row_has_the_least_and_the_median_of_each_side() -> None:
    before = [Start({"first token": second}, {COMMAND: 1.0, "router": second}) for second in (9.0, 5.0, 7.0)]
    after = [Start({"first token": 4.0, "port open": 3.0}, {COMMAND: 0.5})]
    lines = table({"before": before, "after": after}).splitlines()
    assert "| first token | 5.00 / 7.00 | 4.00 / 4.00 |" in lines
    assert "| port open | - | 3.00 / 3.00 |" in lines
    assert "| all processes | 6.00 / 8.00 | 0.50 / 0.50 |" in lines
    assert "| router | 5.00 / 7.00 | - |" in lines


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("ray::ServeReplica:squadron:Router", "router"),
        ("ray::ServeController", "controller"),
        ("/lib/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "Ray's raylet"),
        ("python -u /lib/ray/_private/log_monitor.py", "Ray's log monitor"),
        ("python -u /lib/ray/autoscaler/_private/monitor.py", "Ray's autoscaler monitor"),
        ("sleep 1", "others"),
        ("", None),
    ],
)
def test_processes_are_told_apart(words: str, name: str | None) -> None:
    assert _process_name(words) == name


def test_the_cpu_of_the_command_and_of_what_it_started_is_counted() -> None:
    spin = "import time\nwhile time.process_time() < 0.2: pass\nprint('spun', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"spun\n"
        watch = Watch(psutil.Process(os.getpid()))
        watch.look()
        child.kill()
    assert watch.cpu()["others"] >= 0.15
    assert watch.cpu()[COMMAND] > 0


def test_a_line_of_serves_log_says_when() -> None:
    text = "INFO 2026-01-02 03:04:05,500 controller 1 -- Controller starting\nINFO 2026-01-02 03:04:07,250 a -- b\n"
    first, second = _stamp_of(text, "Controller starting"), _stamp_of(text, "a -- b")
    assert first is not None and second is not None
    assert second - first == pytest.approx(1.75)
    assert _stamp_of(text, "nowhere") is None
