"""What Serve calls the replicas of each model."""

from __future__ import annotations

import re
from hashlib import sha256

from cluster.app_config import AppConfig

ONE = "Replica"


def deployment_names(app: AppConfig) -> list[str]:
    """Return a name for each model's deployment, the same whatever other models there are.

    An app with one model that is not listed calls it always alike: another model takes its place step by step.
    """
    if not app.listed:
        return [ONE]
    return [f"{ONE}-{_safe(name)}" for name in app.names]


def _safe(name: str) -> str:
    """Keep letters, digits, dots, dashes and underscores; a name that this changes gets digits of its own."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    return plain if plain == name else f"{plain}-{sha256(name.encode()).hexdigest()[:8]}"
