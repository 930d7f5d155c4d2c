"""`squadron doctor` beside a real Ray cluster."""

from __future__ import annotations

import platform

import pytest
import ray
from ray._private.utils import check_version_info

from deploy.doctor.checks import Level, ask
from deploy.doctor.network import MISMATCH, RAY_SECONDS, ray_cluster


def test_a_cluster_that_can_be_joined_says_its_size_and_stays(head):
    for _ in range(2):
        found = ray_cluster(
            head.address,
            lambda _: None,
            lambda: ask("ray_cluster", head.address, seconds=RAY_SECONDS, environment=head.environment),
        )
        assert found.level is Level.OK, found.text
        assert f"Ray {ray.__version__}, 1 node, 8 CPUs, 0 GPUs" in found.text


def test_ray_still_calls_a_mismatch_what_the_doctor_looks_for():
    with pytest.raises(RuntimeError, match=MISMATCH):
        check_version_info({"ray_version": "0.1", "python_version": platform.python_version()}, "here")
