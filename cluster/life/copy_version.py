"""What tells one version of a replica or router from another: copies of the same version are left alone by an update.

Serve goes by the text of a config file's `args`; this is for apps that come from `serve.run`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

# How many replicas there are, and what updates do, is Serve's business and none of a replica's.
OF_NUMBERS = (
    "replicas",
    "min_replicas",
    "max_replicas",
    "upscale_delay_s",
    "downscale_delay_s",
    "downscale_to_zero_delay_s",
    "routers",
    "max_surge_percent",
    "update_failure_action",
)


def replica_version(settings: Mapping[str, Any], weights: str) -> str:
    """Return the version of a model's replicas: the same where they would do the same. weights: a fingerprint."""
    return _digest({name: value for name, value in settings.items() if name not in OF_NUMBERS}, weights)


def router_version(settings: Mapping[str, Any], weights: str) -> str:
    """Return the version of the routers of an app with these settings and weights."""
    return _digest(settings, weights)


def _digest(settings: Mapping[str, Any], weights: str) -> str:
    told = json.dumps([version("squadron"), weights, settings], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]
