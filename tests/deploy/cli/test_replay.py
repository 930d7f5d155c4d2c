"""What routers record of an incident: enough to run it again in a simulator, and nothing of what was said in it."""

from __future__ import annotations

import asyncio
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import json
from typer.testing import CliRunner

from cluster.config import ClusterConfig
from cluster.router.incidents import MOST_FILES, IncidentLog
from cluster.router.live_model import incident_log
from cluster.simulator.history import Arrive, Cut, Drain, EngineDies, Event, History, Kill, Partition, Stop
from cluster.simulator.replay import history_of, outcomes, read
from deploy.main import app
from engine.errors import ConfigError
from tests.simulator.histories import run

FAULTS: tuple[Event, ...] = (
    Kill(0.8, "replica-0", 1.0),
    Cut(1.2, "router-0", "replica-1"),
    Stop(1.5, "replica-2", 6.0),
    EngineDies(2.5, "replica-1", 1.0),
    Drain(9.0, "replica-1", 0.5),
    Partition(10.5, "router-1", "replica-2", 6.0),
    Kill(18.0, "router-1", 1.0),
)
ARRIVALS = (
    Arrive(0.3, 11, 8, 40, router=0),
    Arrive(0.4, 12, 8, 40, router=1),
    Arrive(0.5, 13, 20, 30, router=0, leaves=0.2),
    Arrive(1.6, 14, 8, 30, 2, router=0),
    Arrive(2.6, 15, 8, 10, router=1),
    Arrive(10.6, 16, 8, 60, router=1),
    Arrive(25.0, 17, 8, 5, router=0),
)
INCIDENT = History(1, 2, 3, tuple(sorted((*FAULTS, *ARRIVALS), key=lambda event: event.at)))
NAMES = {  # of all that a line can tell
    "t", "what", "router", "wall", "replica", "life", "fingerprint", "draining", "code", "frame", "stream", "streams",
    "prompt", "retried", "number", "tokens", "ends", "request", "max_tokens", "n", "seed", "tenant", "continues",
    "outcome",
}  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> list[Path]:
    """The files of an incident in a simulated cluster."""
    assert run(INCIDENT, str(tmp_path)).violations == ()
    return sorted(tmp_path.iterdir())


def test_an_incident_is_replayed_with_its_faults_where_they_were(recorded: list[Path]) -> None:
    replayed = history_of(read(recorded))
    faults = [event for event in replayed.events if not isinstance(event, Arrive)]
    assert [type(event) for event in faults] == [type(event) for event in FAULTS]
    for found, was in zip(faults, FAULTS, strict=True):
        assert found.at == pytest.approx(was.at, abs=1.0)
        assert getattr(found, "process", "") == getattr(was, "process", "")
    assert [(one.seed, one.prompt, one.choices, one.router) for one in replayed.arrivals] == [
        (one.seed, one.prompt, one.choices, one.router) for one in ARRIVALS
    ]


def test_a_replay_ends_as_the_incident_did(recorded: list[Path]) -> None:
    records = read(recorded)
    assert outcomes(records) == Counter(completed=len(ARRIVALS) - 1, aborted=1)
    ends = run(history_of(records)).ends
    assert Counter(ends) == Counter(whole=len(ARRIVALS) - 1, left=1)
    replayed = CliRunner().invoke(app, ["replay", *map(str, recorded)])
    assert replayed.exit_code == 0
    assert "recorded: 1 aborted, 6 completed\nreplayed: 1 left, 6 whole\n" in replayed.stdout


def test_answers_over_http_are_recorded_as_whole_ones_or_not(tmp_path: Path) -> None:
    history = History(3, 1, 1, (Arrive(0.1, 5, choices=2), Arrive(0.1, 6, tokens=300, leaves=0.5)), ingress=True)
    assert run(history, str(tmp_path)).ends == ("whole", "left")
    assert outcomes(read(tmp_path.iterdir())) == Counter(completed=1, aborted=1)


def test_a_record_has_lengths_and_numbers_and_is_its_owners_alone(recorded: list[Path]) -> None:
    assert len(recorded) == 3  # two routers, and one that came for the one that died
    for path in recorded:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        lines: list[dict[str, Any]] = [json.decode(line) for line in path.read_bytes().splitlines()]
        assert {name for line in lines for name in line} <= NAMES
        assert all(isinstance(line.get("prompt", 0), int) for line in lines)
        assert all(isinstance(line.get("tokens", 0), int) for line in lines)


async def test_files_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    clock = asyncio.get_running_loop().time
    log = IncidentLog(str(tmp_path), "router", clock, most_bytes=4000)
    for number in range(200):
        log.note("end", request=number)
    log.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"incident-router.jsonl", "incident-router.jsonl.1"}
    assert max(sizes.values()) <= 2000
    (record,) = read(tmp_path.iterdir())
    numbers = [told["request"] for told in record.events if told["what"] == "end"]
    assert numbers == list(range(numbers[0], 200))
    for number in range(MOST_FILES + 5):
        IncidentLog(str(tmp_path), f"router-{number}", clock).close()
    assert len(list(tmp_path.iterdir())) == MOST_FILES


async def test_a_router_that_cannot_record_says_which_setting_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = ClusterConfig("demo", record_incidents=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"record_incidents: .*name a folder of your own"):
        incident_log(config, "router")
    assert incident_log(ClusterConfig("demo"), "router") is None


def test_what_is_no_record_is_told(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"t": 1}\n')
    with pytest.raises(
        ConfigError, match=r"other.jsonl: line 1 is not of an incident's record; give files that --rec"
    ):
        read([other])
    with pytest.raises(ConfigError, match="give files that --record-incidents has written"):
        read([])


def test_a_file_that_another_router_deletes_meanwhile_is_no_hindrance(tmp_path, monkeypatch):
    found = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, name: [*found(folder, name), folder / "incident-gone.jsonl"])
    IncidentLog(str(tmp_path), "router", lambda: 0.0).close()
    assert [path.name for path in tmp_path.iterdir()] == ["incident-router.jsonl"]
