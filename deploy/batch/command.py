"""`squadron batch`: from rows to results, through whatever ends it on the way."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath

import msgspec
from rich.console import Console

from cluster.batch.check import Checked, check_input
from cluster.batch.decisive import decisive
from cluster.batch.driver import BatchFigures, Work, drive, refuse_cost
from cluster.batch.dry_run import DryRun, dry_run
from cluster.batch.errors import TooManyErrorsError
from cluster.batch.failures import first_failures
from cluster.batch.ledger.folder import JOB_FILE, refuse_foreign, refuse_within
from cluster.batch.ledger.ledger import Ledger, remove_left
from cluster.batch.ledger.records import Job
from cluster.batch.output.manifest import Manifest
from cluster.batch.output.spec import OutputSpec, default_style
from cluster.batch.output.write import Finished, finished, refuse_replacing, try_output, write_output
from cluster.batch.prepare import Preparer
from cluster.batch.sources.found import is_url, local_path, refuse_output
from cluster.batch.sources.source import STANDARD_INPUT, FileSource, open_source
from cluster.batch.sources.standard_input import forget, kept_path
from cluster.batch.tasks import RowKind, TaskMaker, kind_of, task_maker
from cluster.config import ClusterConfig
from cluster.router.models.served import served_model
from deploy.batch.drive import run_until_told
from deploy.batch.options import BatchOptions, ServedApp
from deploy.batch.places import AppReplicas, OwnReplicas, Place
from deploy.batch.progress import Progress, summary
from deploy.cli.interrupts import Interrupted, Interrupts
from deploy.cli.phases import PhaseLog
from deploy.serve.ray_output import without_death_notices
from engine.loader.fingerprint import model_identity


def run_batch(where: ClusterConfig | ServedApp, options: BatchOptions) -> None:
    """Run a batch to its end, on replicas of its own or those of an app.

    Raises `SquadronError`, and `SystemExit` where it was told to stop.
    """
    console = Console(highlight=False, soft_wrap=True)
    phases = PhaseLog(console)
    with Interrupts() as interrupts:
        try:
            if isinstance(where, ServedApp):
                place: Place = AppReplicas(where, options.ray_address, options.verbose, interrupts)
            else:
                place = OwnReplicas(where, options.ray_address, options.verbose, interrupts, phases)
            with closing(place):
                Batch(place, options, console, phases).run()
        except Interrupted as stop:
            console.print("Stopped. What is done is kept: the same command with --resume goes on from here.")
            raise SystemExit(128 + stop.number) from None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command is to do: rows, what they ask for, and what is to come of them."""

    source: FileSource
    kind: RowKind
    tasks: TaskMaker
    checked: Checked
    spec: OutputSpec


class Batch:
    """One run of the command, on the replicas of `place`."""

    def __init__(self, place: Place, options: BatchOptions, console: Console, phases: PhaseLog) -> None:
        self._place = place
        self._config = place.config
        self._options = options
        self._console = console
        self._phases = phases
        self._ledger_folder = options.ledger or ledger_folder(options.output)
        self._last: BatchFigures | None = None

    def say(self, text: str) -> None:
        """Print one line as it is."""
        self._console.print(text, markup=False)

    def run(self) -> None:
        """Do all that is left to do. Raises `SquadronError`."""
        self._refuse_ledger()
        kept = kept_path(self._ledger_folder, self._options.stdin_suffix)
        was_kept = kept.exists()
        try:
            self._run(self._open())
        finally:
            if self._options.dry_run and not was_kept:
                forget(kept)

    def _run(self, source: FileSource) -> None:
        if source.needs_ray:
            self._place.connect()
        with self._phases.phase("Input") as notes:
            asked = self._read(source)
            notes.append(f"{asked.checked.rows:,} rows")
        job = self._job(asked)
        preparer = Preparer(served_model(self._config), job.digest, self._config.seed, job.created)
        if self._options.dry_run:
            try_output(self._options.output)
            self._tell_dry_run(dry_run(asked.source, asked.tasks.task, preparer))
        elif finished(asked.spec, job):
            remove_left(self._ledger_folder, job)  # of a run that was killed in its last moment
            self.say(f"{self._options.output} is complete already.")
        else:
            try_output(self._options.output)
            with closing(Ledger.open(self._ledger_folder, job, self._options.resume)) as ledger:
                self._go_on(asked, ledger, replace(preparer, created=ledger.job.created))

    def _refuse_ledger(self) -> None:
        """Raise `LedgerError` where the folder of the ledger is not its own: it goes when the batch is done."""
        options = self._options
        named = [one for one in (*options.inputs, options.output) if one != STANDARD_INPUT and not is_url(one)]
        refuse_within(self._ledger_folder, [local_path(one) for one in named])
        refuse_foreign(self._ledger_folder)

    def _open(self) -> FileSource:
        options = self._options
        refuse_output(options.inputs, options.output)
        refuse_replacing(options.output)
        begun = (self._ledger_folder / JOB_FILE).exists()
        return open_source(options.inputs, self._ledger_folder, stdin_suffix=options.stdin_suffix, begun=begun)

    def _read(self, source: FileSource) -> Asked:
        options = self._options
        kind = kind_of(source) if options.kind is None else options.kind
        tasks = task_maker(kind, self._config.model_id, options.columns)
        spec = OutputSpec(options.output, options.style or default_style(kind, options.output), options.answer_column)
        with tempfile.TemporaryDirectory() as folder:
            return Asked(source, kind, tasks, check_input(source, tasks, Path(folder), spec.added_columns), spec)

    def _go_on(self, asked: Asked, ledger: Ledger, preparer: Preparer) -> None:
        """Answer the rows that have no result yet, and put the output in place."""
        began = time.monotonic()
        options, tasks = self._options, asked.tasks
        try:
            if ledger.done.count < ledger.job.rows:
                model, limits = preparer.model, options.limits
                work = Work(self._config, model, asked.source, tasks.task, preparer, ledger, limits, options.share)
                refuse_cost(work)
                self._answer(work)
            options.limits.refuse_errors(ledger)
        except TooManyErrorsError:
            self._tell_failures(first_failures(asked.source, ledger.totals))
            raise
        seconds = time.monotonic() - began
        batch = Finished(ledger.job, asked.source, tasks, ledger.results())
        failures = first_failures(asked.source, ledger.totals)
        manifest = write_output(asked.spec, batch, self._ledger_folder, ledger.check)
        ledger.remove()
        self._tell(manifest, seconds, failures)

    def _job(self, asked: Asked) -> Job:
        options, config = self._options, self._config
        settings = {"kind": asked.kind, "columns": asdict(options.columns), **decisive(config)}
        return Job(
            rows=asked.checked.rows,
            input_digest=asked.checked.digest,
            model=config.model_id,
            fingerprint=model_identity(config.model, config.dtype, config.quantization),
            settings=msgspec.json.encode(settings).decode(),
            created=options.created if options.created is not None else int(time.time()),
            version=version("squadron"),
        )

    def _answer(self, work: Work) -> None:
        """Run all rows that are not done."""
        quiet = nullcontext() if self._options.verbose else without_death_notices()
        progress = Progress(self._console, self._options.log_interval)

        def take(figures: BatchFigures) -> None:
            self._last = figures
            progress.take(figures)

        with quiet, self._place.replicas() as replicas, progress.shown():
            run_until_told(lambda: drive(work, replicas, take))

    def _tell(self, manifest: Manifest, seconds: float, failures: Sequence[str]) -> None:
        if self._last is not None:
            for line in summary(self._last, manifest.errors, seconds, self._config.replicas):
                self.say(line)
        self._tell_failures(failures)
        self.say(f"output    {self._options.output}")
        if manifest.error_file is not None:
            self.say(f"errors    {manifest.error_file.name}")

    def _tell_failures(self, failures: Sequence[str]) -> None:
        for one in failures:
            self.say(f"failed    {one}")

    def _tell_dry_run(self, found: DryRun) -> None:
        self.say(f"rows      {found.rows:,}, of which {found.errors.total():,} would fail")
        self.say(f"tokens    {found.prompt_tokens:,} of prompts, at most {found.most_output_tokens:,} of output")
        for problem in found.problems:
            self.say(f"problem   {problem}")
        if found.errors:
            raise SystemExit(1)


def ledger_folder(output: str) -> Path:
    """Return where the ledger of an output lies: beside it, or here for one behind a URL."""
    return Path((PurePosixPath(output).name if is_url(output) else local_path(output)) + ".ledger")
