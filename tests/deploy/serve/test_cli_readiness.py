"""How a failed start is told from Serve's status, and what the phase lines say."""

import io
from dataclasses import replace

import pytest
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
)
from rich.console import Console

from cluster.errors import ReplicaStartError
from deploy.serve.output import PhaseLog
from deploy.serve.readiness import StartError, gateways_serve, refuse_failed
from engine.errors import CheckpointError, ConfigError


def overview(message: str, status: ApplicationStatus = ApplicationStatus.DEPLOYING) -> ApplicationStatusOverview:
    deployment = DeploymentStatusOverview(
        status=DeploymentStatus.UPDATING,
        status_trigger=DeploymentStatusTrigger.UNSPECIFIED,
        replica_states={},
        message=message,
    )
    return ApplicationStatusOverview(
        status=status, message="", last_deployed_time_s=0.0, deployments={"Replica": deployment}
    )


def test_gateways_are_waited_for_where_there_are_any():
    starting = overview("")
    assert gateways_serve(starting)
    gateway = starting.deployments["Replica"]
    starting.deployments["Gateway"] = gateway
    assert not gateways_serve(starting)
    starting.deployments["Gateway"] = replace(gateway, status=DeploymentStatus.HEALTHY)
    assert gateways_serve(starting)


def traceback_of(error: Exception) -> str:
    return f"Traceback (most recent call last):\n  ...\ncluster.start_error.ReplicaStartError: {error}\n"


def test_an_app_that_is_still_starting_is_left_alone():
    refuse_failed(overview("Deployment 'Replica' has 1 replica that has taken more than 30s to be scheduled."))


def test_a_reason_is_taken_as_soon_as_it_shows_without_waiting_for_retries():
    error = ReplicaStartError.of(ConfigError("the KV cache holds 2 tokens; raise num_kv_blocks", "num_kv_blocks"))
    with pytest.raises(StartError, match=r"^the KV cache holds 2 tokens; raise num_kv_blocks$"):
        refuse_failed(overview(traceback_of(error)))


def test_a_flag_that_the_sentence_lacks_is_added():
    error = ReplicaStartError.of(ConfigError("out of memory", "gpu_memory_utilization"))
    with pytest.raises(StartError, match="out of memory; set --gpu-memory-utilization"):
        refuse_failed(overview(traceback_of(error)))
    with pytest.raises(StartError, match=r"^shard 2 is missing$"):
        refuse_failed(overview(traceback_of(ReplicaStartError.of(CheckpointError("shard 2 is missing")))))


def test_an_unforeseen_failure_shows_the_error_and_where_the_logs_are_not_a_traceback():
    message = 'Traceback (most recent call last):\n  File "x.py", line 1\nOSError: disk full\n'
    with pytest.raises(StartError, match=r"^OSError: disk full \(.*logs.*\)$"):
        refuse_failed(overview(message, ApplicationStatus.DEPLOY_FAILED))


def test_the_logs_are_where_ray_was_told_to_keep_them(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    with pytest.raises(StartError, match=r"\(Ray's logs have more: /scratch/ray/session_latest/logs/serve\)$"):
        refuse_failed(overview("OSError: disk full", ApplicationStatus.DEPLOY_FAILED))


def test_phases_are_the_slowest_of_each_and_the_rest_is_placement():
    output = io.StringIO()
    bodies = [
        {"phases": {"weights": 2.0, "kv blocks": 0.1, "warm-up": 0.5}, "kv_tokens": 4096, "engine": "X, float32"},
        {"phases": {"weights": 1.0, "kv blocks": 0.4, "warm-up": 0.5}, "kv_tokens": 2048, "engine": "X, float32"},
    ]
    PhaseLog(Console(file=output, width=100)).replicas(bodies, 10.0, "2 replicas x 1 ranks")
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert lines == [
        "Placement 7.1 s 2 replicas x 1 ranks",
        "Weights 2.0 s X, float32",
        "KV blocks 0.4 s 2,048 tokens fit in each replica",
        "Warm-up 0.5 s",
    ]
