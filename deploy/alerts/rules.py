"""The alerts as a file of rules that Prometheus reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from deploy.alerts.alert import Alert
from deploy.alerts.scope import EVERYTHING, Scope
from deploy.alerts.table import alerts

GROUP = "squadron"
WIDTH = 110


def rules_text(head: str, ttft: str, scope: Scope = EVERYTHING) -> str:
    """Return the YAML of a file of rules. head: its first line, a comment. ttft: as of `alerts`."""
    rules = [_rule(alert, scope.labels) for alert in alerts(ttft, scope)]
    groups = {"groups": [{"name": GROUP, "rules": rules}]}
    return f"# {head}\n" + yaml.safe_dump(groups, sort_keys=False, width=WIDTH)


def _rule(alert: Alert, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasting,
        "labels": {"severity": alert.severity, **labels},
        "annotations": {"summary": alert.summary, "description": alert.description},
    }
