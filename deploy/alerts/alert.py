"""What an alert is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `lasting`: how long the expression must hold, as Prometheus writes it.

    severity: critical = clients see it now; warning = they will, or may. summary: one line, of its labels.
    description: what it means, and the next command.
    """

    name: str
    expr: str
    lasting: str
    severity: Severity
    summary: str
    description: str
