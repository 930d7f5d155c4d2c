"""A Ray cluster that was there before, under whatever the command does there."""

from __future__ import annotations

import logging

import ray

from deploy.cli.interrupts import while_ray_joins
from deploy.serve.address import knock
from deploy.serve.local_ray import RayCluster, count
from engine.errors import ConfigError

JOIN_SECONDS = 30.0  # a busy machine takes five


class JoinedRay(RayCluster):
    """A cluster that was there before and stays. Raises `ConfigError` when it cannot be reached."""

    def __init__(self, address: str, verbose: bool) -> None:
        late = _problem(address, f"no answer in {JOIN_SECONDS:g} s")
        try:
            knock(address)
            with while_ray_joins(JOIN_SECONDS, late):
                ray.init(
                    address=address, log_to_driver=verbose, logging_level=logging.INFO if verbose else logging.ERROR
                )
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(_problem(address, _first_line(error)), "address") from error
        self.about = f"joined {address}, {count(len(ray.nodes()), 'node')}"

    def alive(self) -> bool:
        """The cluster is not ours to judge."""
        return True

    def stop(self) -> None:
        """Disconnect."""
        ray.shutdown()


def _problem(address: str, why: str) -> str:
    return f"RAY_ADDRESS={address} cannot be joined ({why}); unset it to start Ray here"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
