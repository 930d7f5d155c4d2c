"""`squadron batch`: from rows to results, through whatever ends it on the way."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from rich.console import Console

from cluster.batch.errors import TooManyErrorsError
from cluster.batch.io.check import Checked, check_input
from cluster.batch.io.manifest import Manifest, OutputSpec, Style, default_style, is_finished, refuse_replacing
from cluster.batch.io.output_files import Finished, try_output, write_output
from cluster.batch.io.paths import is_url, local_path, refuse_output
from cluster.batch.io.source import STANDARD_INPUT, FileSource, forget, kept_path, open_source
from cluster.batch.ledger.epoch import JOB_FILE, refuse_foreign, refuse_within
from cluster.batch.ledger.ledger import Ledger, remove_left
from cluster.batch.ledger.records import Job, answer_settings
from cluster.batch.row_requests import Preparer
from cluster.batch.row_tasks import ColumnOptions, RowKind, TaskMaker, kind_of, task_maker
from cluster.batch.run.cost import DryRun, dry_run
from cluster.batch.run.driver import BatchProgress, BatchWork, drive, refuse_cost
from cluster.batch.run.loop import RunLimits
from cluster.config import ClusterConfig
from cluster.router.models import served_model
from cluster.tasks import first_error
from deploy.batch.progress import ProgressDisplay, first_failures, summary
from deploy.batch.replicas import AppReplicas, OwnReplicas, ReplicaProvider, ServedApp
from deploy.cli.processes import SIGNALS, Interrupted, Interrupts, end_now
from deploy.serve.output import PhaseLog, without_death_notices
from engine.device.machine import settle_heap
from engine.loader.fingerprint import model_identity


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What to run, and how.

    inputs, output: paths, patterns or URLs; "-" = standard input. kind, style: of rows and of the output; None = as
    the first row looks. ledger: folder of what is done so far; None = beside the output. share: of `BatchWork`.
    ray_address: cluster to join; None = start one. log_interval: seconds between two lines of progress where there is
    no terminal. created: seconds since 1970 that answers carry; None = when the batch began.
    """

    inputs: tuple[str, ...]
    output: str
    kind: RowKind | None = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    answer_column: str = "answer"
    style: Style | None = None
    stdin_suffix: str = ".jsonl"
    ledger: Path | None = None
    limits: RunLimits = field(default_factory=RunLimits)
    share: float | None = None
    resume: bool = False
    dry_run: bool = False
    ray_address: str | None = None
    log_interval: float = 10.0
    created: int | None = None
    verbose: bool = False


def run_batch(where: ClusterConfig | ServedApp, options: BatchOptions) -> None:
    """Run a batch to its end, on replicas of its own or those of an app.

    Raises `SquadronError`, and `Interrupted` where it was stopped.
    """
    console = Console(highlight=False, soft_wrap=True)
    phases = PhaseLog(console)
    with Interrupts() as interrupts:
        try:
            if isinstance(where, ServedApp):
                provider: ReplicaProvider = AppReplicas(where, options.ray_address, options.verbose, interrupts)
            else:
                provider = OwnReplicas(where, options.ray_address, options.verbose, interrupts, phases)
            with closing(provider):
                BatchCommandRun(provider, options, console, phases).run()
        except Interrupted:
            console.print("Stopped. What is done is kept: the same command with --resume goes on from here.")
            raise


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What the command is to do: rows, what they ask for, and what is to come of them."""

    source: FileSource
    kind: RowKind
    tasks: TaskMaker
    checked: Checked
    spec: OutputSpec


class BatchCommandRun:
    """One run of the command, on the replicas of `provider`."""

    def __init__(self, provider: ReplicaProvider, options: BatchOptions, console: Console, phases: PhaseLog) -> None:
        self._provider = provider
        self._config = provider.config
        self._options = options
        self._console = console
        self._phases = phases
        self._ledger_folder = options.ledger or ledger_folder(options.output)
        self._last: BatchProgress | None = None

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
        with self._phases.phase("Input") as notes:
            plan = self._read(source)
            notes.append(f"{plan.checked.rows:,} rows")
        job = self._job(plan)
        preparer = Preparer(served_model(self._config), job.digest, self._config.seed, job.created)
        if self._options.dry_run:
            try_output(self._options.output)
            self._report_dry_run(dry_run(plan.source, plan.tasks.task, preparer))
        elif is_finished(plan.spec, job):
            remove_left(self._ledger_folder, job)  # of a run that was killed in its last moment
            self.say(f"{self._options.output} is complete already.")
        else:
            try_output(self._options.output)
            with closing(Ledger.open(self._ledger_folder, job, self._options.resume)) as ledger:
                self._go_on(plan, ledger, replace(preparer, created=ledger.job.created))

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

    def _read(self, source: FileSource) -> BatchPlan:
        options = self._options
        kind = kind_of(source) if options.kind is None else options.kind
        tasks = task_maker(kind, self._config.model_id, options.columns)
        spec = OutputSpec(options.output, options.style or default_style(kind, options.output), options.answer_column)
        with tempfile.TemporaryDirectory() as folder:
            return BatchPlan(source, kind, tasks, check_input(source, tasks, Path(folder), spec.added_columns), spec)

    def _go_on(self, plan: BatchPlan, ledger: Ledger, preparer: Preparer) -> None:
        """Answer the rows that have no result yet, and put the output in place."""
        began = time.monotonic()
        options, tasks = self._options, plan.tasks
        try:
            if ledger.done.count < ledger.job.rows:
                model, limits = preparer.model, options.limits
                work = BatchWork(
                    self._config, model, plan.source, tasks.task, preparer, ledger, limits, options.share
                )
                refuse_cost(work)
                self._answer(work)
            options.limits.refuse_errors(ledger)
        except TooManyErrorsError:
            self._report_failures(first_failures(plan.source, ledger.totals))
            raise
        seconds = time.monotonic() - began
        batch = Finished(ledger.job, plan.source, tasks, ledger.results())
        failures = first_failures(plan.source, ledger.totals)
        manifest = write_output(plan.spec, batch, self._ledger_folder, ledger.check)
        ledger.remove()
        self._report(manifest, seconds, failures)

    def _job(self, plan: BatchPlan) -> Job:
        options, config = self._options, self._config
        settings = {"kind": plan.kind, "columns": asdict(options.columns), **answer_settings(config)}
        return Job(
            rows=plan.checked.rows,
            input_digest=plan.checked.digest,
            model=config.model_id,
            fingerprint=model_identity(config.source, config.dtype, config.weight_form, config.hf_overrides),
            settings=msgspec.json.encode(settings).decode(),
            created=options.created if options.created is not None else int(time.time()),
            version=version("squadron"),
        )

    def _answer(self, work: BatchWork) -> None:
        """Run all rows that are not done."""
        quiet = nullcontext() if self._options.verbose else without_death_notices()
        display = ProgressDisplay(self._console, self._options.log_interval)

        def take(now: BatchProgress) -> None:
            self._last = now
            display.take(now)

        with quiet, self._provider.replicas() as replicas, display.shown():
            run_until_stopped(lambda: drive(work, replicas, take))

    def _report(self, manifest: Manifest, seconds: float, failures: Sequence[str]) -> None:
        if self._last is not None:
            for line in summary(self._last, manifest.errors, seconds, self._config.replicas):
                self.say(line)
        self._report_failures(failures)
        self.say(f"output    {self._options.output}")
        if manifest.error_file is not None:
            self.say(f"errors    {manifest.error_file.name}")

    def _report_failures(self, failures: Sequence[str]) -> None:
        for one in failures:
            self.say(f"failed    {one}")

    def _report_dry_run(self, found: DryRun) -> None:
        self.say(f"rows      {found.rows:,}, of which {found.errors.total():,} would fail")
        self.say(f"tokens    {found.prompt_tokens:,} of prompts, at most {found.most_output_tokens:,} of output")
        for problem in found.problems:
            self.say(f"problem   {problem}")
        if found.errors:
            raise SystemExit(1)


def run_until_stopped(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work()` to its end. Raises its error, or `Interrupted` after the first Ctrl-C or SIGTERM.

    Told to stop, the work is cancelled and may write down what it has; a second signal ends the process at once.
    """
    signals: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work())

        def stop(number: int) -> None:
            if signals:
                end_now(128 + number)
            signals.append(number)
            task.cancel()

        settle_heap()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        if not signals:
            raise
        raise Interrupted(signals[0]) from None
    except BaseExceptionGroup as group:
        raise first_error(group) from group


def ledger_folder(output: str) -> Path:
    """Return where the ledger of an output lies: beside it, or here for one behind a URL."""
    return Path((PurePosixPath(output).name if is_url(output) else local_path(output)) + ".ledger")
