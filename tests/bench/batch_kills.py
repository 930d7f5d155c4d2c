"""A batch under kill -9: `python -m tests.bench.batch_kills` kills drivers, replicas and ranks, tears files.

The output must be, byte for byte, that of a run which nothing befell.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
from rich.console import Console

from tests.bench.kills import figures_table
from tests.bench.machine import provenance
from tests.chaos.batch import FULL, KINDS, RANK, REPLICA, TORN, BatchProcess, rows, tallied, tear, until, write_rows
from tests.chaos.small_disk import SmallDisk

MODEL = ("--model", "demo", "--replicas", "2", "-tp", "2", "--cpus-per-worker", "0.5", "--log-interval", "0.5")
NAMES = {REPLICA: "BatchReplica", RANK: "WorkerActor"}
WORK_SECONDS = 300.0
MOST_DRAWN_AGAIN = 0.02  # of the tokens; of a few rows the share may be larger


@dataclass(slots=True)
class BatchSiege:
    """The report. torn: bytes that were cut off. windows: seconds from the last write to the kill of a driver.

    tokens: of the output. quiet, killed: what the replicas sent and prefilled, without and with kills. disk: what was
    full. left: whether a ledger was left at the end.
    """

    rows: int
    seed: int
    kills: list[str] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    windows: list[float] = field(default_factory=list)
    undisturbed_s: float = 0.0
    disturbed_s: float = 0.0
    tokens: int = 0
    quiet: tuple[int, int] = (0, 0)
    killed: tuple[int, int] = (0, 0)
    disk: str = "played"
    left: bool = False
    problems: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Return what goes into a table or a file."""
        return {
            "rows": self.rows,
            "seed": self.seed,
            "kills": len(self.kills),
            "kills_by_kind": dict(Counter(self.kills)),
            "output_tokens": self.tokens,
            "undisturbed_s": self.undisturbed_s,
            "disturbed_s": self.disturbed_s,
            "last_write_to_kill_s_median": statistics.median(self.windows) if self.windows else 0.0,
            "drawn_again_share": self.killed[0] / self.quiet[0] - 1,
            "prefilled_quiet": self.quiet[1],
            "prefilled_killed": self.killed[1],
            "full_disk": self.disk,
            "problems": len(self.problems),
        }


def drawn_kinds(kills: int, seed: int) -> list[str]:
    """Return the kinds of so many kills: each as often as the others, in an order that the seed draws."""
    kinds = [KINDS[i % len(KINDS)] for i in range(kills)]
    Random(seed).shuffle(kinds)
    return kinds


class Besieger:
    """Runs a batch of `count` rows once in peace and once under kills of these kinds, in `home`."""

    def __init__(self, home: Path, count: int, tokens: int, kinds: Sequence[str], seed: int) -> None:
        self.report = BatchSiege(count, seed)
        self._home = home
        self._input = write_rows(home / "rows.jsonl", rows(count, tokens, seed))
        self._kills = len(kinds)
        self._rng = Random(seed)
        self._kinds = list(kinds)

    def run(self) -> BatchSiege:
        """Run both, compare, and return what was seen."""
        began = time.monotonic()
        quiet = self._in_peace()
        self.report.undisturbed_s = time.monotonic() - began
        self.report.quiet = tallied(self._home)
        manifest = json.loads((self._home / "quiet.jsonl.manifest.json").read_text())
        self.report.tokens = manifest["output_tokens"]
        began = time.monotonic()
        killed = self._under_siege(quiet.stat().st_size)
        self.report.disturbed_s = time.monotonic() - began
        self.report.killed = tallied(self._home / "killed")
        for name in ("", ".errors.jsonl"):
            if Path(f"{quiet}{name}").read_bytes() != Path(f"{killed}{name}").read_bytes():
                self.report.problems.append(f"killed.jsonl{name} differs from quiet.jsonl{name}")
        return self.report

    def _in_peace(self) -> Path:
        output = self._home / "quiet.jsonl"
        process = BatchProcess(str(self._input), str(output), *MODEL, home=self._home)
        if process.wait() != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{process.text}")
        return output

    def _under_siege(self, size: int) -> Path:
        """Kill evenly over the work, which is `size` bytes of answers."""
        output, home = self._home / "killed.jsonl", self._home / "killed"
        home.mkdir()
        with ExitStack() as stack:
            disk = self._small_disk(stack)
            ledger = Path(f"{output}.ledger") if disk is None else disk.folder / "ledger"
            command = (str(self._input), str(output), *MODEL, "--ledger", str(ledger), "--resume")
            while not output.exists():
                room = self._rng.randrange(10_000, 60_000) if self._next == FULL else None
                if room is None:
                    self._until_struck(BatchProcess(*command, home=home), ledger, size)
                elif disk is None:
                    self._until_full(BatchProcess(*command, home=home, room=room))
                else:
                    disk.fill(room)
                    self._until_full(BatchProcess(*command, home=home))
                    disk.empty()
            self.report.left = ledger.exists()
        return output

    def _small_disk(self, stack: ExitStack) -> SmallDisk | None:
        """Mount one for the ledger; None where that is not allowed, so that drivers must play one."""
        try:
            disk = stack.enter_context(SmallDisk(self._home / "disk"))
        except OSError as error:
            print(f"full disks are played, for none can be mounted here: {error}", flush=True)
            return None
        self.report.disk = "tmpfs"
        return disk

    @property
    def _next(self) -> str | None:
        return self._kinds[0] if self._kinds else None

    def _until_full(self, process: BatchProcess) -> None:
        try:
            process.wait()
        finally:
            process.kill()
        if "No space left on device" not in process.text:
            self.report.problems.append(f"a full disk was not told: {process.text[-300:]}")
        self._struck(FULL)

    def _until_struck(self, process: BatchProcess, ledger: Path, size: int) -> None:
        try:
            self._strike_while(process, ledger, size)
        finally:
            process.kill()

    def _strike_while(self, process: BatchProcess, ledger: Path, size: int) -> None:
        """Kill what the seed says until the driver has ended, by our hand or at the end of its work."""
        while self._next is not None:
            due = size * (len(self.report.kills) + self._rng.random()) / (self._kills + 4)
            if not until(lambda due=due: _written(ledger) >= due or not process.running, WORK_SECONDS):
                raise RuntimeError(f"nothing is written:\n{process.text}")
            if not process.running:
                break
            kind = self._next
            if kind in NAMES:
                if until(lambda kind=kind: process.named(NAMES[kind]) or not process.running, WORK_SECONDS):
                    self._kill_one(process.named(NAMES[kind]))
                continue
            last = max(path.stat().st_mtime for path in ledger.glob("*.log"))
            process.process.kill()
            if kind == FULL:
                return  # the next driver finds its disk full
            self.report.windows.append(max(0.0, time.time() - last))
            process.kill()
            if kind == TORN:
                self.report.torn.append(tear(ledger, self._rng))
            self._struck(kind)
            return
        process.wait()

    def _kill_one(self, victims: list[psutil.Process]) -> None:
        if victims:
            self._rng.choice(victims).kill()
            self._struck(self._kinds[0])

    def _struck(self, kind: str) -> None:
        self._kinds.pop(0)
        self.report.kills.append(kind)
        print(f"kill {len(self.report.kills)}: {kind}", flush=True)


def _written(ledger: Path) -> int:
    """Bytes of results so far."""
    return sum(path.stat().st_size for path in ledger.glob("rows-*.log"))


def main() -> None:
    """Run, print, and fail where a byte differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=60, help="of an answer, on average a little more")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="squadron-batch-"))
    kinds = drawn_kinds(options.kills, options.seed)
    report = Besieger(home, options.rows, options.tokens, kinds, options.seed).run()
    figures = report.figures() | provenance()
    if figures["drawn_again_share"] > MOST_DRAWN_AGAIN:
        report.problems.append(f"more than {MOST_DRAWN_AGAIN:.0%} of the tokens were drawn again")
    Console().print(figures_table(figures, "a batch under kills"))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=2))
    if report.problems:
        raise SystemExit("\n".join(report.problems))
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
