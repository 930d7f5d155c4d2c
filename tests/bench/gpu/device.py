"""The device that a bench is asked to run on."""

from __future__ import annotations

import torch


def device_named(name: str, otherwise: str = "--device cpu") -> torch.device:
    """Return the device by its name, a GPU with its number.

    Raises `ValueError` when it is not here; `otherwise` is what works without a GPU.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: there is no such device; known: cuda, cuda:1, cpu") from None
    if device.type == "cpu":
        return device
    number, seen = device.index or 0, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or number >= seen:
        works = "--device cuda:0" if seen else otherwise
        raise ValueError(f"--device {name}: torch {torch.__version__} sees {seen} CUDA devices here; try {works}")
    return torch.device("cuda", number)
