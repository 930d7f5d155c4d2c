"""Engine and parallel run on a machine with torch, transformers, safetensors, tokenizers and numpy alone."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib.abc, sys

# pydantic, typer and rich are left: transformers takes them itself where it finds them (import-linter watches ours).
ABSENT = {"ray", "fastapi", "starlette", "uvicorn", "grpc", "msgspec", "prometheus_client"}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())

import pkgutil, engine, parallel
from importlib import import_module
for package in (engine, parallel):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        import_module(module.name)

from engine.llm import LLM
from engine.sampling_params import SamplingParams
with LLM("deploy/demo_model", max_model_len=128, num_kv_blocks=64) as llm:
    answer = llm.generate("import os\\n", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0]
assert len(answer.outputs[0].token_ids) == 5
assert not ABSENT & {name.split(".")[0] for name in sys.modules}
print("text:", answer.outputs[0].text)
"""


def test_every_module_imports_and_a_model_generates_without_ray_and_friends() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.startswith("text:")
