"""What `python -m tests.bench.gpu` refuses, and what it makes of a part's process that ends as it should not."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bench.gpu import __main__ as command
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.child import TRACEBACK, Ended, exit_reason, run_group
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.results import Results
from tests.bench.gpu.scale import TINY

TINY_ON_CPU = ("--device", "cpu", "--shapes", "tiny")


def part_of(*names, name="p"):
    return Part(name, name, tuple(Figure(one, one, "s") for one in names), lambda bench: None)


def refused(capsys, *arguments):
    """Return what a command says that ends with 2 and measures nothing."""
    with pytest.raises(SystemExit) as error:
        command.main([str(one) for one in arguments])
    told = capsys.readouterr()
    assert (error.value.code, told.out) == (2, "")
    assert "Traceback" not in told.err
    return told.err


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("arguments", [(), ("--device", "cuda"), ("--shapes", "tiny", "--device", "cuda:1")])
def test_without_a_gpu_it_refuses_and_says_what_works(arguments, no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = refused(capsys, *arguments)
    assert "--device cuda" in told and "sees 0 CUDA devices here; try --device cpu --shapes tiny" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--device", "cpu"), "add --shapes tiny"),
        (("--device", "gpu"), "--device gpu: there is no such device; known: cuda, cuda:1, cpu"),
        ((*TINY_ON_CPU, "--minutes", "0"), "--minutes 0: must be above 0"),
        ((*TINY_ON_CPU, "--minutes", "-3"), "--minutes -3: must be above 0"),
        ((*TINY_ON_CPU, "--minutes", "nan"), "--minutes nan: must be above 0"),
        ((*TINY_ON_CPU, "--results", "no/such/folder.json"), "no/such/folder.json: no file can be there"),
        ((*TINY_ON_CPU, "--results", "."), "no file can be there"),
        ((*TINY_ON_CPU, "--also", "no/such"), "--also no/such: there is no such folder"),
        (("--table", "missing.json"), "--table missing.json: there is no such file"),
        (("--table", "."), "--table .: there is no such file"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, reason, capsys):
    assert reason in refused(capsys, *arguments)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"runs": []}', '{"runs": [], "rows": [{"name": "x"}]}', "\udcff"])
def test_a_file_that_holds_no_results_is_named(text, tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_text(text, errors="surrogateescape")
    assert f"{file}: no file of results of this bench" in refused(capsys, "--table", file)
    assert f"{file}: no file of results of this bench" in refused(capsys, *TINY_ON_CPU, "--results", file)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, capsys):
    file = tmp_path / "r.json"
    file.write_text("{}")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    assert f"{file}: cannot be read: Permission denied" in refused(capsys, "--table", file)


@pytest.mark.parametrize(
    ("run", "refuses"),
    [
        ({"shapes": "tiny", "device": "cpu"}, False),
        ({"shapes": "tiny", "device": "cuda:0"}, True),
        ({"shapes": "real", "device": "cpu"}, True),
    ],
)
def test_figures_of_a_gpu_are_never_kept_beside_those_that_prove_the_code(run, refuses, tmp_path, capsys):
    results = Results(tmp_path / "r.json")
    results.begin(run)
    results.take(Figure("p/a", "a", "s"), [1.0])
    before = results.path.read_text()
    if refuses:
        told = refused(capsys, *TINY_ON_CPU, "--only", "limits", "--results", results.path)
        assert f"holds figures of {run['shapes']} shapes on {run['device'][:4].rstrip(':')}" in told
        assert results.path.read_text() == before
    else:
        command.main([*TINY_ON_CPU, "--only", "limits", "--results", str(results.path)])
        assert [one["shapes"] for one in Results(results.path).runs] == ["tiny", "tiny"]


def test_tables_are_of_one_size_of_shapes(tmp_path, capsys):
    results = Results(tmp_path / "r.json")
    results.begin({"shapes": "tiny", "device": "cpu"})
    results.take(Figure("limits/copy", "a", "s"), [1.0])
    assert f"{results.path}: holds figures of tiny shapes on cpu" in refused(capsys, "--table", results.path)
    assert command.main(["--table", str(results.path), "--shapes", "tiny"]) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cuda:2", None), ("mps", None)],
)
def test_a_gpu_is_named_by_its_number(name, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if expected:
        assert str(command.device_named(name)) == expected
    else:
        with pytest.raises(ValueError, match=f"--device {name}: .* sees 2 CUDA devices here; try --device cuda:0"):
            command.device_named(name)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Run parts on a GPU that is played, each process as `play` has it; returns the code and the rows."""

    def run(parts, play, *arguments):
        monkeypatch.setattr(command, "catalogue", lambda scale: parts)
        monkeypatch.setattr(command, "device_named", lambda *_: torch.device("cuda:0"))
        monkeypatch.setattr(command, "run_group", play)
        file = tmp_path / "r.json"
        code = command.main(["--shapes", "tiny", "--results", str(file), *arguments])
        return code, Results(file).rows if file.exists() else {}

    return run


def wrote(asked, *names):
    """Write rows as a part's process does."""
    results = Results(Path(asked[asked.index("--results") + 1]))
    results.begin({})
    for name in names:
        results.take(Figure(name, name, "s"), [1.0])


def test_a_process_that_dies_leaves_its_reason_and_the_run_goes_on(measured, capsys):
    def killed(asked, timeout):
        wrote(asked, "p/a" if "p" in asked else "q/a")
        return Ended(-9 if "p" in asked else 0)

    code, rows = measured([part_of("p/a", "p/b"), part_of("q/a", name="q")], killed)
    assert code == command.FAILED
    assert (rows["p/a"].value, rows["q/a"].value) == (1.0, 1.0)
    assert rows["p/b"].error == "the process of this part was ended by SIGKILL"
    told = capsys.readouterr().out
    assert "2 measured, 1 failed, 0 skipped, 0 left" in told
    assert f"p/b{' ' * 45} failed: the process" in told


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_process_that_ends_without_its_rows_has_failed_whatever_its_code(code, measured, capsys):
    asked = [part_of("p/a", "p/b")]
    done = measured(asked, lambda asked, timeout: Ended(code, "ImportError: no cuda"))
    reason = f"the process of this part ended with code {code}; its last words: ImportError: no cuda"
    assert done[0] == command.FAILED
    assert [row.error for row in done[1].values()] == [reason, reason]
    assert "0 measured, 2 failed, 0 skipped, 0 left" in capsys.readouterr().out


def test_a_figure_that_failed_before_fails_with_what_ended_the_process_now(measured):
    asked = [part_of("p/a")]
    measured(asked, lambda asked, timeout: Ended(1, "once"))
    _, rows = measured(asked, lambda asked, timeout: Ended(1, "again"))
    assert rows["p/a"].error.endswith("again")


def test_what_was_measured_is_kept_when_its_process_dies_later(measured):
    asked = [part_of("p/a", "p/b")]
    measured(asked, lambda asked, timeout: (wrote(asked, "p/a"), Ended(0))[1])
    code, rows = measured(asked, lambda asked, timeout: Ended(1))
    assert code == command.FAILED
    assert rows["p/a"].value == 1.0 and rows["p/b"].error


def test_what_is_left_when_the_minutes_are_over_has_not_failed(measured, capsys):
    def slow(asked, timeout):
        assert 540 < timeout <= 540 + command.GRACE
        wrote(asked, "p/a")
        raise subprocess.TimeoutExpired(asked, timeout)

    code, rows = measured([part_of("p/a", "p/b"), part_of("q/a", name="q")], slow, "--minutes", "9")
    assert (code, rows.keys()) == (0, {"p/a"})
    told = capsys.readouterr().out
    assert "the 9 minutes are over; run the same command again" in told
    assert "1 measured, 0 failed, 0 skipped, 2 left" in told


def test_a_process_that_stops_for_the_time_leaves_the_rest_for_later(measured, monkeypatch):
    """It ends by itself with 0, having begun nothing new."""

    def in_time(asked, timeout):
        monkeypatch.setattr(time, "monotonic", lambda: math.inf)
        return Ended(0)

    assert measured([part_of("p/a")], in_time, "--minutes", "9") == (0, {})


def test_whoever_interrupts_it_is_told_how_to_go_on(measured, capsys):
    def interrupted(asked, timeout):
        raise KeyboardInterrupt

    code, rows = measured([part_of("p/a")], interrupted)
    assert (code, rows) == (command.INTERRUPTED, {})
    assert "run the same command again" in capsys.readouterr().err


def test_a_part_that_is_done_starts_no_process(tmp_path, monkeypatch):
    bench = Bench(Results(tmp_path / "r.json"), TINY, torch.device("cuda:0"), tmp_path)
    whole = part_of("p/a")
    bench.results.take(whole.figures[0], [1.0])
    monkeypatch.setattr(command, "run_group", None)
    command.run_apart(whole, bench, None)
    with pytest.raises(TypeError):
        command.run_apart(whole, replace(bench, again=True), command._parser().parse_args([]))


def test_the_last_words_are_those_of_the_error():
    before = (
        f"a warning\n{TRACEBACK}  File 1\nKeyError: 1\n\nDuring handling, another:\n\n{TRACEBACK}  File 2\n    x\n"
    )
    assert exit_reason(before + "RuntimeError: CUDA error\nCompile with ...\n") == "RuntimeError: CUDA error"
    assert exit_reason("some\nlast line\n\n") == "last line"
    assert exit_reason("") == exit_reason("\n \n") == ""


def test_how_a_process_ended_is_said_in_words():
    assert str(Ended(3)) == "the process of this part ended with code 3"
    assert str(Ended(-11, "x")) == "the process of this part was ended by SIGSEGV; its last words: x"
    assert str(Ended(-99)) == "the process of this part was ended by signal 99"


def test_a_process_that_raises_is_heard_and_its_words_are_passed_on(capfd):
    ended = run_group([sys.executable, "-c", "print('out'); raise ValueError('what was wrong')"], None)
    assert ended == Ended(1, "ValueError: what was wrong")
    told = capfd.readouterr()
    assert told.out == "out\n" and TRACEBACK in told.err
    assert run_group(["sh", "-c", "exit 3"], None) == Ended(3)
    assert run_group(["sh", "-c", "kill -KILL $$"], None) == Ended(-9)


def test_a_part_that_is_out_of_time_ends_with_all_that_it_started(tmp_path):
    pid = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run_group(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], 1.5)
    assert ends(int(pid.read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_the_bench_ends_its_part_too(number, tmp_path):
    """As the command does it, with a part whose process starts another one and never ends."""
    pid = tmp_path / "pid"
    part = f"sleep 60 & echo $! > {pid}; wait"
    played = (
        "import runpy, subprocess, sys, torch\n"
        "torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)\n"
        "begin = subprocess.Popen\n"
        f"subprocess.Popen = lambda command, **more: begin(['sh', '-c', {part!r}], **more)\n"
        f"sys.argv[1:] = ['--shapes', 'tiny', '--results', {str(tmp_path / 'r.json')!r}]\n"
        "runpy.run_module('tests.bench.gpu', run_name='__main__')\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", played], stderr=subprocess.DEVNULL)
    try:
        assert within(60, lambda: pid.is_file() and pid.read_text().endswith("\n"))
        os.kill(bench.pid, number)
        assert bench.wait(30) == 128 + number
        assert ends(int(pid.read_text()))
    finally:
        bench.kill()
        bench.wait()


def ends(pid):
    return within(20, lambda: not is_alive(pid))


def within(seconds, found):
    """Whether `found` says yes before so many seconds are over."""
    deadline = time.monotonic() + seconds
    while not (yes := found()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return yes


def is_alive(pid):
    """Whether a process runs; one that has ended and that nobody asked for its code does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
