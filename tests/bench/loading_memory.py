"""Memory that quantised weights take, while they load and after: `python -m tests.bench.loading_memory`.

A model of 12 of Qwen3-0.6B's layers and 32,768 tokens, plain and in each format. Each loads in a process of its own,
whose memory is told by the system, less what it had with one layer of the same sizes loaded before. The head is
packed beside the embedding that it is tied to, 64 MB more than the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from tests.bench.machine import provenance
from tests.bench.random_model import OF_06B, save_random_model

SIZES = {**OF_06B, "vocab_size": 32_768}
STORED = ("int8", "int8 packed groups", "int4", "fp8 channel", "deepseek", "gptq", "awq", "nvfp4", "mxfp4")
MADE: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "int8 at load": {"quantization": "int8"},
    "int4 at load": {"quantization": "int4"},
}
MB = 1 << 20


def main() -> None:
    """Print a line for each format as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs=2, metavar=("FOLDERS", "FLAGS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.load:
        print(json.dumps(_load(*map(json.loads, asked.load))))
        return
    table = Table("weights", "checkpoint, MB", "held, MB", "most while loading, MB")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for layers, name in ((1, "one"), (12, "all")):
            save_random_model(folder / name, sizes={**SIZES, "num_hidden_layers": layers})
            _in_bfloat16(folder / name)
        for name, flags in MADE.items():
            _measured(table, name, [folder / "one", folder / "all"], flags)
        for kind in STORED:
            made = [_stored(folder / each, folder / f"{each} {kind}", kind) for each in ("one", "all")]
            _measured(table, kind, made, {})
    console = Console(width=120)
    console.print(provenance())
    console.print(table)


def _measured(table: Table, name: str, folders: list[Path], flags: Mapping[str, Any]) -> None:
    command = [sys.executable, "-m", __spec__.name, "--load", json.dumps([*map(str, folders)]), json.dumps(flags)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    held, most = found["held"], found["most"]
    numbers = (_bytes(folders[1]), held, most)
    table.add_row(name, *(f"{number / MB:.0f}" for number in numbers))
    print(f"{name}: {most / MB:.0f} MB", file=sys.stderr)


def _load(folders: list[str], flags: dict[str, Any]) -> dict[str, int]:
    """Return what the second folder's model takes, and the most that it took while it was loaded."""
    from engine.config import EngineConfig
    from engine.worker.runner import ModelRunner
    from parallel.group import SoloGroup

    def runner(folder: str) -> ModelRunner:
        config = EngineConfig(folder, num_kv_blocks=16, max_model_len=128, device="cpu", dtype="bfloat16", **flags)
        return ModelRunner(config, SoloGroup())

    torch.set_num_threads(1)
    runner(folders[0])  # what a process has once, whatever the model
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the system forgets the most that there was
    model = runner(folders[1])
    held, most = _resident() - before, _most() - before
    assert model.model is not None
    return {"held": held, "most": most}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _most() -> int:
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _in_bfloat16(folder: Path) -> None:
    """Write the plain tensors of a checkpoint again, in bfloat16; scales stay as they are."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        plain = {name: tensor.bfloat16() for name, tensor in tensors.items() if name.endswith(".weight")}
        save_file(
            tensors | {name: each for name, each in plain.items() if tensors[name].dtype is torch.float32}, file
        )


def _stored(plain: Path, folder: Path, kind: str) -> Path:
    from tests.parity.stored_formats import FORMATS, store

    store(plain, folder, *FORMATS[kind])
    _in_bfloat16(folder / "stored")
    return folder / "stored"


if __name__ == "__main__":
    main()
