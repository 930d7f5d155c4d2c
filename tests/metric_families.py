"""What tests ask of the table of metric families."""

from __future__ import annotations

from cluster.telemetry.families import Family, Source


def at_routers(family: Family) -> bool:
    """Whether a router's `/metrics` shows a family."""
    return family.source in (Source.ROUTER, Source.TOLD)
