"""Export a checkpoint for OpenVINO GenAI, its weights in fp32: `PYTHON make_ir.py CHECKPOINT FOLDER DTYPE`."""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export


def main() -> None:
    checkpoint, folder = sys.argv[1:3]
    main_export(checkpoint, folder, task="text-generation-with-past", library_name="transformers")


if __name__ == "__main__":
    main()
