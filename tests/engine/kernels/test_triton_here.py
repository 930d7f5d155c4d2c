"""Where Triton cannot run, torch serves and the log says why: an engine starts on such a GPU as well."""

import importlib.util
import shutil

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.triton_fit import why_not_triton
from engine.kernels.base import TorchKernels
from engine.kernels.select import select_draws, select_kernels
from engine.kernels.triton_kernels import TritonKernels
from engine.kernels.triton_sampler import TritonDraws
from tests.engine.paged_lab import spec

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A machine with all that is needed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def no_package(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))


def old_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))


def no_compiler(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)


def no_headers(monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: "/nowhere")
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_triton_serves_gpus():
    assert type(select_kernels(64, torch.bfloat16, CUDA)) is TritonKernels
    assert type(select_draws(CUDA)) is TritonDraws
    assert why_not_triton(spec(device=CUDA)) is None
    assert not isinstance(select_draws(torch.device("cpu")), TritonDraws)


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        (no_package, "triton is not installed"),
        (old_gpu, "needs compute capability 8.0"),
        (no_compiler, "install gcc"),
        (no_headers, "no /nowhere/Python.h; install python3-dev"),
    ],
)
def test_where_something_lacks_torch_serves_and_the_log_says_why(monkeypatch, caplog, lacking, reason):
    lacking(monkeypatch)
    assert type(select_kernels(64, torch.bfloat16, CUDA)) is TorchKernels
    assert select_draws(CUDA) is None
    assert caplog.text.count(reason) == 2
    assert reason in why_not_triton(spec(device=CUDA))


def test_a_compiler_may_be_named(monkeypatch):
    no_compiler(monkeypatch)
    monkeypatch.setenv("CC", "tcc")
    assert why_not_triton(spec(device=CUDA)) is None


def test_headers_may_lie_elsewhere(monkeypatch):
    no_headers(monkeypatch)
    monkeypatch.setenv("CPATH", "/opt/include")
    assert why_not_triton(spec(device=CUDA)) is None
