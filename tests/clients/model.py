"""The demo model with a chat template that reads tools: the one that ships refuses them.

    python -m tests.clients.model FOLDER
    squadron serve FOLDER --served-model-name demo --tool-call-parser hermes

It was not taught to call any. Where a call is forced, a grammar has it write one.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from deploy.demo import demo_model_path

TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def write_model(folder: Path) -> Path:
    """Write the checkpoint into `folder`, which is made, and return it."""
    shutil.copytree(demo_model_path(), folder, dirs_exist_ok=True)
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    return folder


def main() -> None:
    """Write the model where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(write_model(parser.parse_args().folder))


if __name__ == "__main__":
    main()
