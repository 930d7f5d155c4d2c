"""`squadron doctor`: all checks, as lines or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module

from rich.console import Console
from rich.text import Text

from deploy.doctor.checks import Check, Finding, Level, examine, exit_code
from deploy.serve.environment import Environment

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FIX: "bold red"}
PROBE_SECONDS = 70.0  # more than a process has that is asked for Ray or torch


@dataclass(frozen=True, slots=True)
class Where:
    """Where the server is to listen. grpc_port: None = nowhere."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None


def all_checks(where: Where, environment: Environment, model: str | None = None) -> list[Check]:
    """Return every check, in the order of the report. model: one that is to be served, None = any."""
    checks = [
        Check("packages", CheckIn("packages", "check_versions")),
        Check("shadowed", CheckIn("packages", "check_shadowed")),
        Check("ray cluster", CheckIn("network", "check_ray", (environment.ray_address,)), PROBE_SECONDS),
        Check("gpus", CheckIn("machine", "check_devices"), PROBE_SECONDS),
        Check("gpu links", CheckIn("gpu_host", "check_links")),
        Check("infiniband", CheckIn("gpu_host", "check_infiniband")),
        Check("weights", CheckIn("machine", "check_weights"), PROBE_SECONDS),
        Check(
            "port",
            CheckIn(
                "network",
                "check_port",
                (where.host, where.port, "port"),
            ),
        ),
        Check("shared memory", CheckIn("machine", "check_shared_memory")),
        Check("open files", CheckIn("machine", "check_open_files")),
        Check("clock", CheckIn("gpu_host", "check_clock")),
        Check("disks", CheckIn("machine", "check_disks", (environment.ray_tmpdir,))),
        Check("hub", CheckIn("network", "check_hub")),
    ]
    if where.grpc_port is not None:
        after = next(place for place, check in enumerate(checks, 1) if check.name == "port")
        checks.insert(
            after,
            Check("grpc port", CheckIn("network", "check_port", (where.host, where.grpc_port, "grpc_port"))),
        )
    if model is not None:
        checks.append(Check("model", CheckIn("model", "check_model", (model,)), PROBE_SECONDS))
    return checks


@dataclass(frozen=True, slots=True)
class CheckIn:
    """A check of `deploy.doctor.<module>`, imported when it runs.

    Where a package is missing that this one check needs, the others still report.
    """

    module: str
    function: str
    arguments: tuple[object, ...] = ()

    def load(self) -> Callable[..., Sequence[Finding]]:
        """Import and return the function."""
        found: Callable[..., Sequence[Finding]] = getattr(
            import_module(f"deploy.doctor.{self.module}"), self.function
        )
        return found

    def __call__(self) -> Sequence[Finding]:
        """Run the check."""
        return self.load()(*self.arguments)


def run_doctor(checks: Sequence[Check], as_json: bool) -> int:
    """Run the checks, print what they find, and return the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    findings: list[Finding] = []
    for finding in examine(checks):
        findings.append(finding)
        if not as_json:
            console.print(line(finding))
    if as_json:
        print(json.dumps(report(findings)))
    else:
        console.print(summary(findings))
    return exit_code(findings)


def line(finding: Finding) -> Text:
    """Return a finding as a line, and its remedy as a second one."""
    text = Text.assemble((f"{finding.level:8}", STYLES[finding.level]), f"{finding.check}: {finding.text}")
    if finding.remedy:
        text.append(f"\n{'':8}-> {finding.remedy}")
    return text


def summary(findings: Iterable[Finding]) -> str:
    """Return the last line."""
    levels = [finding.level for finding in findings]
    to_fix, warnings = levels.count(Level.FIX), levels.count(Level.WARNING)
    if to_fix:
        return f"{to_fix} to fix, {warnings} to know of."
    return f"Ready to serve; {warnings} to know of." if warnings else "Ready to serve."


def report(findings: Sequence[Finding]) -> dict[str, object]:
    """Return all findings for JSON."""
    return {"ready": exit_code(findings) == 0, "findings": [asdict(finding) for finding in findings]}
