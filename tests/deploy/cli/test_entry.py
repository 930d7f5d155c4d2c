"""What happens before the command itself is there."""

from __future__ import annotations

import subprocess
import sys

PRESSED = """
import os, signal, sys

class Presses:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presses())
from deploy.entry import main
main()
"""


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_word() -> None:
    ended = subprocess.run([sys.executable, "-c", PRESSED], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
