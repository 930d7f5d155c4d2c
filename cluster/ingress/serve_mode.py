"""Which ingress Ray Serve was started with. The one place that looks into Serve's private constants."""

from __future__ import annotations

from ray.serve._private import constants

from engine.errors import ConfigError


def check_ingress(ingress: str) -> None:
    """Raise `ConfigError` where `ingress` is `haproxy` and this Ray was started without it (its processes agree)."""
    if ingress == "haproxy" and not haproxy_enabled():
        raise ConfigError(
            "ingress: haproxy is chosen when Ray starts, with RAY_SERVE_ENABLE_HA_PROXY=1 on every node",
            "ingress",
        )


def haproxy_enabled() -> bool:
    """Whether Serve puts HAProxy in front; a Serve without this constant does not."""
    return bool(getattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", False))
