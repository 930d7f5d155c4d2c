"""`squadron demo-failover` as a person runs it: it kills a replica for real, and its exit code is the proof."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.command import START_SECONDS, Command, wait_gone


def test_it_kills_a_replica_and_no_stream_notices(tmp_path: Path) -> None:
    command = Command(
        *("demo-failover", "--kills", "1", "--every", "1", "--streams", "4", "--tokens", "200"), home=tmp_path
    )
    try:
        command.wait_for("kill -9 ")
        started = command.descendants()
        assert command.wait(START_SECONDS) == 0, command.text
        wait_gone(started)
    finally:
        command.kill()
    assert re.search(r"kill -9 \d+: replica \w+, with \d+ sequences", command.text)
    assert re.search(r"all 2 replicas serve again, \d+\.\d s after the kill", command.text)
    said = re.fullmatch(r"1 kill: (\d+) answers exact, 0 not; (\d+) moved .*", command.lines[-1].strip())
    assert said, command.text
    assert int(said[1]) >= 4
    assert int(said[2]) >= 1
