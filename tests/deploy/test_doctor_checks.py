"""`squadron doctor`: what each check says of bad surroundings."""

from __future__ import annotations

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import httpx
import pytest
import torch

from deploy.cli.terminal import GIB, MIB
from deploy.doctor.checks import Level, ProbeError, ask
from deploy.doctor.machine import (
    GOOD_CACHE,
    DiskSpace,
    check_disks,
    devices,
    disk,
    nvidia_devices,
    open_files,
    shared_memory,
    weights,
)
from deploy.doctor.network import check_port, hub, port_free, ray_cluster
from deploy.doctor.packages import check_shadowed, check_versions, package_versions, python_version, shadowed
from engine.kernels.compiler import chosen_isa
from engine.kernels.native_linear import product_library

HOME = Path("/srv/squadron")
OWN = dict.fromkeys(("parallel", "engine", "cluster", "deploy"), HOME)


def levels(findings):
    return [finding.level.value for finding in findings]


class Installed:
    """Versions of what is installed; anything else is not."""

    def __init__(self, **versions):
        self._versions = versions

    def __call__(self, name):
        try:
            return self._versions[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None


# Versions.


def test_an_old_python_is_to_be_replaced():
    assert python_version("3.11.2", ">=3.11").level is Level.OK
    found = python_version("3.10.9", ">=3.11")
    assert (found.level, "3.10.9" in found.text) == (Level.FIX, True)


def test_missing_and_old_packages_are_to_be_installed_by_name():
    needs = ["torch>=2.11", "ray[serve]>=2.60", "numpy>=1.26", "rich>=13", 'openai>=2 ; extra == "test"']
    found = package_versions(needs, Installed(torch="2.9.1", numpy="2.1.0"))
    assert [(each.check, each.level.value) for each in found] == [
        ("torch", "fix"),
        ("ray", "fix"),
        ("rich", "fix"),
        ("packages", "ok"),
    ]
    assert found[0].text == "2.9.1, but >=2.11 is asked for"
    assert found[1].remedy == "pip install 'ray[serve]>=2.60'"
    assert "1 more" in found[-1].text


def test_a_build_of_torch_with_a_local_version_fits():
    (torch, _) = package_versions(["torch>=2.11"], Installed(torch="2.13.0+cu130"))
    assert torch.level is Level.OK


def test_odd_versions_and_requirements_are_warnings():
    found = package_versions(["torch>=2.11", "!!"], Installed(torch="local build"))
    assert levels(found) == ["warning", "warning", "ok"]


def test_what_is_installed_here_is_as_asked_for():
    found = check_versions()
    assert Level.FIX not in [each.level for each in found]
    assert {"squadron", "python", "torch", "ray", "transformers"} <= {each.check for each in found}


# Shadowed packages.


def test_another_distribution_with_a_package_of_our_name_is_told():
    owners = {"engine": ["squadron", "Game-Engine"], "cluster": ["squadron"], "rich": ["rich"]}
    (found,) = shadowed(owners, OWN, HOME)
    assert found.level is Level.FIX
    assert found.remedy.startswith("pip uninstall Game-Engine, then pip install --force-reinstall")
    assert "Game-Engine installs a package 'engine' too" in found.text


def test_a_folder_that_hides_ours_is_told():
    found = shadowed({}, OWN | {"cluster": Path("/home/me/work"), "engine": None}, HOME)
    assert levels(found) == ["fix", "fix"]
    assert "`import engine` finds it nowhere" in found[0].text
    assert "`import cluster` finds it in /home/me/work, not in /srv/squadron" in found[1].text


def test_nothing_hides_ours_here():
    assert levels(check_shadowed()) == ["ok"]
    assert levels(shadowed({"engine": ["squadron"]}, OWN, HOME)) == ["ok"]


# Ray.


def nobody(address):
    raise ConnectionRefusedError(111, "Connection refused")


def test_without_an_address_no_ray_is_asked():
    def never(*_):
        raise AssertionError("asked")

    assert ray_cluster(None, never, never).level is Level.OK


def test_a_cluster_says_its_size():
    found = ray_cluster("auto", lambda _: None, lambda: {"version": "2.60.0", "nodes": 3, "cpus": 48.0, "gpus": 8.0})
    assert (found.level, found.text) == (Level.OK, "RAY_ADDRESS=auto: Ray 2.60.0, 3 nodes, 48 CPUs, 8 GPUs")


def test_an_address_where_nobody_listens_is_to_be_fixed():
    found = ray_cluster("10.0.0.1:6379", nobody, dict)
    assert found.level is Level.FIX
    assert "10.0.0.1:6379: nobody listens" in found.text
    assert "unset RAY_ADDRESS" in found.remedy


def test_a_hung_ray_is_to_be_fixed():
    def hung():
        raise ProbeError("no answer within 45 s")

    found = ray_cluster("auto", lambda _: None, hung)
    assert "no answer within 45 s" in found.text
    assert "`ray stop`" in found.remedy, "the address may be that of a Ray that was killed"
    assert "`ray stop`" not in ray_cluster("10.0.0.1:6379", lambda _: None, hung).remedy


def test_another_version_of_ray_is_told_with_both():
    error = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.11.2\nThis process"
    found = ray_cluster("auto", lambda _: None, lambda: {"error": error, "version": "2.60.0"})
    assert found.level is Level.FIX
    assert "Ray: 2.59.0 Python: 3.11.2" in found.text
    assert "here it is Ray 2.60.0" in found.remedy


def test_a_cluster_that_refuses_is_told_in_its_words():
    found = ray_cluster("auto", lambda _: None, lambda: {"error": "Could not find\nany Ray", "version": "2.60.0"})
    assert "cannot be joined: Could not find any Ray" in found.text


# GPUs.


def torch_report(**values):
    gpu = {"name": "NVIDIA H200", "free": 139 * GIB, "total": 140 * GIB}
    usual = {
        "torch": "2.13.0",
        "cuda": "13.0",
        "available": True,
        "gpus": [gpu, gpu],
        "nccl": True,
        "flash_attn": True,
        "triton": True,
        "complaint": "",
    }
    return lambda: usual | values


def test_gpus_that_can_be_used():
    found = devices(2, torch_report())
    assert levels(found) == ["ok", "ok", "ok"]
    assert found[0].text == "2 x NVIDIA H200"


def test_without_gpus_the_cpu_serves():
    assert levels(devices(0, torch_report(gpus=[], available=False, cuda=None))) == ["ok", "ok"]


def test_a_torch_for_cpus_beside_gpus_is_to_be_replaced():
    (found,) = devices(4, torch_report(gpus=[], available=False, cuda=None, torch="2.13.0+cpu"))
    assert found.level is Level.FIX
    assert "offers 4, but torch 2.13.0+cpu is built for CPUs" in found.text


def test_a_driver_that_is_too_old_is_told_in_torchs_words():
    (found,) = devices(1, torch_report(gpus=[], available=False, complaint="The NVIDIA driver is too old"))
    assert found.level is Level.FIX
    assert "too old" in found.text
    assert "driver" in found.remedy


def test_gpus_that_are_hidden_or_in_use_are_told():
    busy = {"name": "NVIDIA H200", "free": 20 * GIB, "total": 140 * GIB}
    found = devices(2, torch_report(gpus=[busy]))
    assert levels(found)[:3] == ["ok", "warning", "warning"]
    assert "torch sees 1 of 2" in found[1].text
    assert "GPU 0 has 20.0 GiB of 140.0 GiB free" in found[2].text


def test_several_gpus_need_nccl_and_flash_attention_is_faster():
    found = devices(2, torch_report(nccl=False, flash_attn=False, triton=False))
    assert [(each.check, each.level.value) for each in found[1:]] == [("nccl", "fix"), ("attention", "warning")]
    assert devices(1, torch_report(flash_attn=False))[-1].level.value == "ok"
    alone = devices(1, torch_report(nccl=False, gpus=torch_report()()["gpus"][:1]))
    assert alone[1].level is Level.WARNING


def test_a_torch_that_cannot_be_imported_is_told():
    def broken():
        raise ProbeError("ended with 1: ImportError: libtorch.so")

    assert "libtorch.so" in devices(0, broken)[0].text


def test_gpus_are_counted_by_their_device_files(tmp_path):
    for name in ("nvidia0", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert nvidia_devices(tmp_path) == 2


# Quantised weights.


@pytest.mark.parametrize(
    ("report", "level", "words"),
    [
        ({"gpu": True, "fp8": True}, "ok", "fp8 by matrix units"),
        ({"gpu": True, "fp8": False}, "ok", "no units for fp8"),
        (
            {"gpu": False, "fp8": False, "compiled": "avx512_bf16"},
            "ok",
            "products compiled for avx512_bf16",
        ),
        (
            {"gpu": False, "fp8": False, "compiled": None, "why": "multiply.c is wrong"},
            "warning",
            "multiply.c is wrong",
        ),
    ],
)
def test_what_multiplies_by_quantised_weights_is_told(report, level, words):
    (found,) = weights(lambda: report)
    assert (found.check, found.level.value) == ("weights", level)
    assert words in found.text


def test_a_probe_of_weights_that_fails_is_told():
    def broken():
        raise ProbeError("no answer within 60 s")

    (found,) = weights(broken)
    assert found.level is Level.WARNING
    assert "no answer" in found.text


def test_the_probe_of_weights_says_what_this_machine_runs():
    found = ask("weights", seconds=120.0)
    if not found["gpu"]:
        compiled = product_library(torch.float32) is not None
        assert found["compiled"] == (chosen_isa() if compiled else None)


# Ports.


def test_a_taken_port_is_to_be_changed_unless_serve_has_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = port_free("127.0.0.1", port, "grpc_port", lambda: False)
        assert (found.check, found.level) == (f"port {port}", Level.FIX)
        assert "choose another --grpc-port" in found.remedy
        assert port_free("127.0.0.1", port, "port", lambda: True).level is Level.OK
    assert port_free("127.0.0.1", 0, "port", lambda: False).level is Level.OK


@pytest.mark.parametrize(("body", "level"), [(b"success", "ok"), (b"<html>it works</html>", "fix")])
def test_serve_is_known_by_its_answer(body, level):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (found,) = check_port("127.0.0.1", server.server_port, "port")
        server.shutdown()
    assert found.level == level


# Shared memory, files, disks.


@pytest.mark.parametrize(("free", "level"), [(64 * MIB, "fix"), (512 * MIB, "warning"), (8 * GIB, "ok")])
def test_shared_memory(free, level):
    found = shared_memory(DiskSpace(free, 0, free))
    assert found.level == level
    assert ("--shm-size" in found.remedy) is (level != "ok")


def test_a_system_without_shared_memory_files():
    assert shared_memory(None).level is Level.OK


@pytest.mark.parametrize(
    ("soft", "hard", "level", "words"),
    [
        (256, 1 << 20, "fix", "ulimit -n 65536"),
        (1024, 1 << 20, "warning", "ulimit -n 65536"),
        (1024, -1, "warning", "ulimit -n 65536"),
        (1024, 20_000, "warning", "ulimit -n 20000"),
        (1024, 4096, "warning", "hard limit of 4,096"),
        (65536, 65536, "ok", ""),
        (-1, -1, "ok", ""),
    ],
)
def test_open_files(soft, hard, level, words):
    found = open_files(soft, hard)
    assert found.level == level
    assert words in found.remedy


@pytest.mark.parametrize(
    ("used", "free", "level"),
    [(99, 0.5, "fix"), (10, 5, "warning"), (979, 21, "warning"), (100, 900, "ok")],
)
def test_disks(tmp_path, used, free, level):
    usage = DiskSpace(int((used + free) * GIB), used * GIB, int(free * GIB))
    found = disk("model cache", tmp_path / "not" / "yet", GOOD_CACHE, "make room", lambda _: usage)
    assert found.level == level
    assert found.remedy == ("" if level == "ok" else "make room")


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))
    found = disk("model cache", tmp_path / "not" / "yet", GOOD_CACHE, "make room")
    assert (found.level, asked) == (Level.FIX, [tmp_path])


def test_the_disks_of_ray_are_checked(tmp_path):
    _, temporary = check_disks(str(tmp_path / "ray"))
    assert str(tmp_path / "ray") in temporary.text


# The hub.


def hub_finding(answer, token=None, offline=False):
    def handler(request):
        if isinstance(answer, Exception):
            raise answer
        assert request.headers.get("Authorization") == (f"Bearer {token}" if token else None)
        assert request.url.path == ("/api/whoami-v2" if token else "/")
        return httpx.Response(answer)

    with httpx.Client(transport=httpx.MockTransport(handler)) as client:
        return hub("https://hub.example", offline, token, client)


def test_the_hub():
    assert hub_finding(200).text == "https://hub.example answers"
    assert hub_finding(200, token="secret").text.endswith("takes the token")
    assert hub_finding(503).level is Level.WARNING
    assert hub_finding(AssertionError("asked"), offline=True).level is Level.OK


def test_a_hub_out_of_reach_is_a_warning_and_a_refused_token_is_to_be_fixed():
    found = hub_finding(httpx.ConnectTimeout("timed out"))
    assert found.level is Level.WARNING
    assert "HF_ENDPOINT" in found.remedy
    refused = hub_finding(401, token="secret")
    assert (refused.level, "secret" in refused.text) == (Level.FIX, False)
