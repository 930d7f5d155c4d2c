"""Engine and parallel run on a machine with torch, transformers, safetensors, tokenizers and numpy alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long import long

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


PUBLIC = """
import sys

import engine, engine.scheduler.scheduler
from engine import RequestOutput, SamplingParams
assert "torch" not in sys.modules, "requests and the scheduler know no tensors"

from engine import LLM
for name in engine.__all__:
    assert getattr(engine, name).__name__ == name
assert set(engine.__all__) <= set(dir(engine))
try:
    engine.LLMs
except AttributeError as error:
    print(error)
"""


def test_the_public_names_are_the_engines_own_and_cost_nothing_before_their_use() -> None:
    run = subprocess.run([sys.executable, "-c", PUBLIC], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == "module 'engine' has no attribute 'LLMs'\n"


# No `if __name__ == "__main__"`: a rank that ran this again would print it again, and start ranks of its own.
UNGUARDED = """
import sys
from engine import LLM, SamplingParams, StructuredOutput
print("begun", flush=True)
llm = LLM("deploy/demo_model", tensor_parallel_size=2, device="cpu", max_model_len=128, num_kv_blocks=64)
assert "torch._dynamo" not in sys.modules, "it takes 2 s of a core to import, at every start"
for structured in (None, StructuredOutput("regex", "[ab]{9}")):  # a helper compiles that, a process as well
    answer = llm.generate("import os\\n", SamplingParams(max_tokens=5, structured=structured), use_tqdm=False)[0]
    print(len(answer.outputs[0].token_ids))
llm.close()
"""


@pytest.mark.parametrize("run_as", ["script", long("standard input"), "notebook"])
def test_a_group_of_ranks_needs_no_guard_around_the_program(tmp_path: Path, run_as: str) -> None:
    (tmp_path / "program.py").write_text(UNGUARDED)
    in_a_notebook = f"exec(compile(open({str(tmp_path / 'program.py')!r}).read(), '<cell 1>', 'exec'))"
    command = {"script": [str(tmp_path / "program.py")], "standard input": ["-"], "notebook": ["-c", in_a_notebook]}
    given = {**os.environ, "PYTHONPATH": os.getcwd()}
    run = subprocess.run(
        [sys.executable, *command[run_as]], input=UNGUARDED, capture_output=True, text=True, timeout=120, env=given
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["begun", "5", "5"]
