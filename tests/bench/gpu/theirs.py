"""transformers' model of a checkpoint, which ours is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def their_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model, ready to compute. Its attention is torch's sdpa: flash-attn need not be there."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # which would stand between the rows
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval()
