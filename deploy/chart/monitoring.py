"""Dashboards and alerts as files. Helm reads files of its chart alone, so that it has copies of its own."""

from __future__ import annotations

from pathlib import Path

from deploy.alerts.rules import rules_text
from deploy.alerts.scope import Scope
from deploy.dashboards.engine import ENGINE
from deploy.dashboards.grafana import dashboard_text
from deploy.dashboards.service import SERVICE

HEAD = "Written by `python -m deploy.chart` from deploy/alerts/table.py: change it there."
DASHBOARDS = {"service": SERVICE, "engine": ENGINE}


def monitoring_files(folder: Path, ttft: str, scope: Scope) -> dict[Path, str]:
    """Return what `folder` should hold in dashboards/ and alerts/. ttft and scope: as of `alerts`."""
    rules = folder / "alerts" / "squadron.rules.yaml"
    boards = {
        folder / "dashboards" / f"{name}.json": dashboard_text(dashboard) for name, dashboard in DASHBOARDS.items()
    }
    return {**boards, rules: rules_text(HEAD, ttft, scope)}
