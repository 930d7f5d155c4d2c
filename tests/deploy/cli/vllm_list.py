"""`python -m tests.deploy.cli.vllm_list PYTHON` writes `vllm_flags.json` anew; PYTHON is one that has vLLM.

The file holds vLLM's version and, by group, the spellings of every flag of `vllm serve`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "vllm_flags.json"
PYTHON = "SQUADRON_VLLM_PYTHON"  # environment variable: an interpreter that has vLLM
ASK = """
import json, sys
sys.argv = ["vllm"]
from vllm import __version__
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
groups = {}
for group in parser._action_groups:
    names = [list(action.option_strings) for action in group._group_actions if action.option_strings]
    if names:
        groups.setdefault(group.title, []).extend(names)
print("LIST" + json.dumps({"version": __version__, "groups": groups}))
"""
LOG_TO_STDERR = {"VLLM_CONFIGURE_LOGGING": "0"}


def installed_list(python: str) -> dict[str, Any]:
    """Ask vLLM's own parser. Raises `CalledProcessError` where that interpreter has no vLLM that can be imported."""
    done = subprocess.run(
        [python, "-c", ASK], env={**os.environ, **LOG_TO_STDERR}, capture_output=True, text=True, check=True
    )
    line = next(one for one in done.stdout.splitlines() if one.startswith("LIST"))
    found: dict[str, Any] = json.loads(line.removeprefix("LIST"))
    return found


def stored_list() -> dict[str, Any]:
    """Return what the file holds."""
    found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    told = installed_list(sys.argv[1])
    PATH.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"written: vLLM {told['version']}, {sum(map(len, told['groups'].values()))} flags")
