"""`squadron doctor`: how checks are run, and what the command makes of them."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from deploy.doctor import checks as probe
from deploy.doctor import command
from deploy.doctor.checks import Check, Finding, Level, ProbeError, ask, examine, exit_code, fix, ok, warning
from deploy.doctor.command import CheckIn, Where, all_checks, line, report, summary
from deploy.serve.environment import Environment

# How checks are run.


def test_findings_come_in_order_and_a_check_that_raises_is_one_line():
    def broken():
        raise RuntimeError("first line\nsecond line")

    found = list(examine([Check("a", lambda: [ok("a", "fine")]), Check("b", broken), Check("c", list)]))
    assert [finding.check for finding in found] == ["a", "b"]
    assert found[1].level is Level.WARNING
    assert "RuntimeError: first line second line" in found[1].text


def test_a_check_that_hangs_is_left_behind_and_told():
    release = threading.Event()
    try:
        (found,) = examine([Check("disk", lambda: [ok("disk", "")] if release.wait() else [], seconds=0.05)])
    finally:
        release.set()
    assert (found.check, found.level) == ("disk", Level.FIX)
    assert "no answer within 0.05 s" in found.text


def test_checks_run_side_by_side():
    meeting = threading.Barrier(3, timeout=10)
    found = examine([Check(name, lambda: [ok("met", str(meeting.wait()))]) for name in "abc"])
    assert sorted(finding.text for finding in found) == ["0", "1", "2"]


def test_only_what_must_be_fixed_makes_the_exit_code_1():
    assert exit_code([ok("a", ""), warning("b", "", "")]) == 0
    assert exit_code([ok("a", ""), fix("b", "", "")]) == 1


def test_a_package_that_is_missing_costs_one_check_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    monkeypatch.delitem(sys.modules, "deploy.doctor.packages", raising=False)
    first, second = examine(
        [Check("packages", CheckIn("packages", "check_versions")), Check("b", lambda: [ok("b", "")])]
    )
    assert first.level is Level.WARNING
    assert "packaging.requirements" in first.text
    assert second.level is Level.OK


# Probes in processes of their own.


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "PROBES", tmp_path)

    def write(text):
        (tmp_path / "it.py").write_text(text)
        return lambda seconds=30.0: ask("it", "argument", seconds=seconds)

    return write


def test_a_probe_answers_with_its_last_line(script):
    assert script("import sys; print('noise'); print('{\"a\": \"%s\"}' % sys.argv[1])")() == {"a": "argument"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ImportError('libcuda.so.1: no such file')", "ended with 1: ImportError: libcuda"),
        ("print('[1]')", "ended with 0: it said nothing"),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "killed by signal 11"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_a_probe_that_fails_is_told_in_a_few_words(script, text, words):
    with pytest.raises(ProbeError, match=words):
        script(text)(seconds=0.5 if "sleep" in text else 30.0)


def test_a_probe_is_not_shadowed_by_the_working_directory(script, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert script("import json; print(json.dumps({'a': 1}))")() == {"a": 1}


def test_the_probe_of_torch_says_what_is_here():
    found = ask("torch_devices", seconds=60.0)
    assert found["torch"].split(".")[0].isdecimal()
    assert found["available"] is bool(found["gpus"])


# The command.


FINDINGS = [ok("ray", "2.60.0"), warning("hub", "away", "give folders"), fix("torch", "old", "pip install torch")]


def test_lines_carry_the_remedy_beneath():
    assert line(FINDINGS[0]).plain == "ok      ray: 2.60.0"
    assert line(FINDINGS[2]).plain == "fix     torch: old\n        -> pip install torch"


def test_the_last_line_counts():
    assert summary(FINDINGS) == "1 to fix, 1 to know of."
    assert summary(FINDINGS[:2]) == "Ready to serve; 1 to know of."
    assert summary(FINDINGS[:1]) == "Ready to serve."


def test_json_has_every_finding():
    found = json.loads(json.dumps(report(FINDINGS)))
    assert found["ready"] is False
    assert found["findings"][1] == {"check": "hub", "level": "warning", "text": "away", "remedy": "give folders"}


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_all_and_returns_the_code(monkeypatch, capsys, as_json):
    shown = io.StringIO()
    monkeypatch.setattr(command, "Console", lambda **_: Console(file=shown))
    code = command.run_doctor([Check("a", lambda: FINDINGS)], as_json)
    text = capsys.readouterr().out if as_json else shown.getvalue()
    assert code == 1
    assert "pip install torch" in text


def test_all_that_is_promised_is_checked():
    checks = all_checks(Where(grpc_port=9000), Environment(ray_address="auto"), "demo")
    names = [check.name for check in checks]
    promised = ("packages", "shadowed", "ray cluster", "gpus", "gpu links", "infiniband", "weights", "port")
    assert names == [*promised, "grpc port", "shared memory", "open files", "clock", "disks", "hub", "model"]
    for check in checks:
        assert callable(check.run.load())


def test_the_doctor_checks_this_machine_and_ends_in_time():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        run = subprocess.run(
            [sys.executable, "-c", "from deploy.main import main; main()", "doctor", "demo", "--json", "--port", "0"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"RAY_ADDRESS": address, "HF_HUB_OFFLINE": "1"},
        )
    found = {each["check"]: Finding(**each) for each in json.loads(run.stdout)["findings"]}
    assert run.returncode == 1
    assert run.stderr == ""
    assert f"RAY_ADDRESS={address}: nobody listens" in found["ray cluster"].text
    assert {
        "squadron",
        "shadowed",
        "gpus",
        "weights",
        "port",
        "shared memory",
        "open files",
        "infiniband",
        "memlock",
        "gpu links",
        "clock",
        "model cache",
        "hub",
        "model",
        "model memory",
        "model weights",
    } <= found.keys()
