"""Export a checkpoint for OpenVINO GenAI: `PYTHON make_ir.py CHECKPOINT FOLDER DTYPE`.

Plain weights are written in fp32. In int8 they have a scale a channel, in int4 one for each 128 inputs, and the table
of tokens is in int8, as OpenVINO's own command does.
"""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig, OVWeightQuantizationConfig

FORMS = {
    "int8": OVWeightQuantizationConfig(bits=8, sym=True),
    "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0),
}


def main() -> None:
    checkpoint, folder, dtype = sys.argv[1:]
    form = FORMS.get(dtype)
    main_export(
        checkpoint, folder, task="text-generation-with-past", library_name="transformers",
        ov_config=None if form is None else OVConfig(quantization_config=form),
    )  # fmt: skip


if __name__ == "__main__":
    main()
