"""Launched ranks: their death is noticed, and none outlives its parent whatever happens to that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from parallel.errors import ChannelError, ParallelError
from parallel.launcher import LocalWorkerGroup, launch
from tests.parallel import parallel_targets

TIMEOUT = 60.0  # seconds, for machines that are busy with other tests
ROOT = str(Path(__file__).parents[2])

# No `if __name__ == "__main__"`: users' scripts often have none.
SCRIPT = """
import os, threading, time
from parallel.launcher import launch
from tests.parallel import parallel_targets

gangs = []
starter = lambda: gangs.append(launch(3, parallel_targets.wait))
{start}
os.write(1, b"started\\n")
{then}
"""
IN_MAIN_THREAD = "starter()"
IN_A_THREAD_THAT_ENDS = "thread = threading.Thread(target=starter); thread.start(); thread.join()"


def run_script(start: str, then: str, path: Path | None = None) -> subprocess.Popen[str]:
    """Run the script in a session of its own and return when its two ranks wait."""
    text = SCRIPT.format(start=start, then=then)
    command = ["-c", text]
    if path is not None:
        path.write_text(text)
        command = [str(path)]
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert process.stdout is not None
    lines = sorted(process.stdout.readline() for _ in range(3))
    assert lines == ["rank 1 waits\n", "rank 2 waits\n", "started\n"]
    return process


def rest_of(process: subprocess.Popen[str], reply: str | None = None) -> str:
    """Return the rest of the output, which ends only when no process holds the pipe any more."""
    try:
        return process.communicate(reply, timeout=TIMEOUT)[0]
    finally:
        process.kill()


@pytest.mark.parametrize("start", [IN_MAIN_THREAD, IN_A_THREAD_THAT_ENDS])
def test_ranks_end_with_a_parent_that_is_killed(start: str):
    process = run_script(start, "time.sleep(600)")
    process.kill()
    assert rest_of(process) == ""


def test_ctrl_c_ends_everything_with_one_traceback(tmp_path):
    process = run_script(IN_MAIN_THREAD, "time.sleep(600)", tmp_path / "script.py")
    os.killpg(process.pid, signal.SIGINT)
    assert rest_of(process).count("KeyboardInterrupt") == 1


def test_ranks_end_with_a_script_that_just_ends_even_when_stopped(tmp_path):
    then = "import os, signal; input(); os.kill(gangs[0].pids[0], signal.SIGSTOP)"
    process = run_script(IN_MAIN_THREAD, then, tmp_path / "script.py")
    assert rest_of(process, "go on") == ""
    assert process.returncode == 0


def test_a_killed_rank_is_told_by_number_and_signal():
    with launch(3, parallel_targets.wait) as gang:
        assert gang.alive()
        assert gang.wait_for_death(0.0) is None
        gang.check()
        os.kill(gang.pids[1], signal.SIGKILL)
        failure = gang.wait_for_death(TIMEOUT)
        assert failure == f"rank 2 (pid {gang.pids[1]}) was killed by SIGKILL"
        assert not gang.alive()
        with pytest.raises(ChannelError, match=r"rank 2 .* SIGKILL"):
            gang.check()


def test_a_failed_rank_is_told_with_its_last_words(capfd):
    with launch(2, parallel_targets.fail) as gang:
        failure = gang.wait_for_death(TIMEOUT)
        assert failure is not None
        assert failure.endswith("ended with exit code 1: ValueError: rank 1 has no such weight")
        gang.kill()
        assert gang.failure() == failure
    assert "Traceback" in capfd.readouterr().err


def test_ranks_get_their_number_and_arguments_and_may_end_in_peace(tmp_path):
    with launch(3, parallel_targets.finish, (str(tmp_path / "note"),)) as gang:
        assert gang.join(TIMEOUT)
        assert gang.exit_codes == (0, 0)
    notes = [(tmp_path / f"note.{rank}").read_text() for rank in (1, 2)]
    assert notes == ["1 False", "2 False"]  # and the launcher alone costs no import of torch


def test_a_killed_gang_leaves_no_process():
    gang = launch(2, parallel_targets.wait)
    gang.kill()
    gang.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(gang.pids[0], 0)


def test_a_gang_that_nobody_holds_is_ended():
    pids = launch(2, parallel_targets.wait).pids
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_gang_of_one_starts_nothing():
    with launch(1, parallel_targets.wait) as gang:
        assert isinstance(gang, LocalWorkerGroup)
        assert gang.pids == ()
        assert gang.alive()
        assert gang.failure() is None


def test_a_target_that_cannot_be_imported_is_refused():
    def local(rank: int) -> None: ...

    with pytest.raises(ParallelError, match="cannot be imported"):
        launch(2, local)
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        launch(0, parallel_targets.wait)


def test_threads_that_launch_at_once_leave_the_main_module_in_place():
    main, gangs, together = sys.modules["__main__"], [], threading.Barrier(8)

    def start():
        together.wait(TIMEOUT)
        gangs.append(launch(2, parallel_targets.wait))

    threads = [threading.Thread(target=start) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert sys.modules["__main__"] is main
        assert len(gangs) == 8
    finally:
        sys.modules["__main__"] = main
        for gang in gangs:
            gang.kill()
