"""The policy as Ray Serve calls it, in its controller, some times a second.

A file of its own, so that the controller imports neither the app nor its deployments.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.config_values import ScalingSettings
from cluster.lifecycle.autoscaling_policy import Scaler, read_stats

REPORT_SECONDS = 2.0  # how often replicas and handles report to the controller
LOOK_BACK = 5.0  # seconds that Serve keeps of it
BOUNDS = ("min_replicas", "max_replicas")
POLICY = "cluster.lifecycle.serve_autoscaling:ReplicaScaling"  # as a Serve config file names it


class ReplicaScaling:
    """Made once for a deployment; times as in `ScalingSettings`, by name.

    The bounds are those that Serve holds at each call: with another policy Serve would build the app anew and start
    every replica again, while other bounds alone start and stop what they must.
    """

    def __init__(self, **times: float) -> None:
        self._scaler = Scaler(ScalingSettings(0, 1, **times))

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas and no state: that is here."""
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        self._scaler.stay_within(least, max(least, most, 1))
        loads, queue = read_stats(context.raw_metrics or {})
        missing = max(0, context.current_num_replicas - len(loads))
        return self._scaler.decide(time.monotonic(), context.target_num_replicas, loads, queue, missing), {}


def autoscaling_fields(settings: ScalingSettings, initial_replicas: int) -> dict[str, Any]:
    """Return Serve's autoscaling settings as a config file says them, without the policy's function.

    Serve starts the first replica itself when a call waits for one.

    A number to start with holds for each update anew, which would then begin with the replicas of a quiet hour. So it
    is left out where it is what Serve comes to anyway.
    Its own delays go by the wall clock, which jumps: they are left out, the policy has those of `settings`.
    """
    times = {name: value for name, value in asdict(settings).items() if name not in BOUNDS}
    return {
        "min_replicas": settings.min_replicas,
        "initial_replicas": None if initial_replicas <= max(settings.min_replicas, 1) else initial_replicas,
        "max_replicas": settings.max_replicas,
        "metrics_interval_s": REPORT_SECONDS,
        "look_back_period_s": LOOK_BACK,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "policy": {"policy_kwargs": times},
    }


def autoscaling_config(settings: ScalingSettings, initial_replicas: int) -> AutoscalingConfig:
    """Return Serve's autoscaling settings, those of `autoscaling_fields`."""
    fields = autoscaling_fields(settings, initial_replicas)
    policy = AutoscalingPolicy(policy_function=ReplicaScaling, **fields.pop("policy"))
    with warnings.catch_warnings():
        # `metrics_interval_s` is to give way to variables of the environment, which hold for all apps of a cluster.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(**fields, policy=policy)
