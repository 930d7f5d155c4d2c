"""The alerts as a file of rules that Prometheus reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from deploy.alerts.alert import Alert

GROUP = "squadron"
WIDTH = 110


def rules_text(alerts: Sequence[Alert], head: str) -> str:
    """Return the YAML of a file of rules. head: its first line, a comment."""
    groups = {"groups": [{"name": GROUP, "rules": [_rule(alert) for alert in alerts]}]}
    return f"# {head}\n" + yaml.safe_dump(groups, sort_keys=False, width=WIDTH)


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.description},
    }
