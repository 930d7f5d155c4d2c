"""Which way to multiply by weights is the fastest on this machine: measured once for each shape, and kept."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from engine.device.host_memory import as_in_steps
from engine.kernels.compiler import FOLDER, chosen_isa
from parallel.c_library import cache_folder, processor
from parallel.file_lock import locked
from parallel.linear import LinearMethod

logger = logging.getLogger(__name__)

ROWS = (1, 8, 128)  # a stream alone, a few, a prompt
ROUNDS = 3
MOST_WEIGHTS = 1 << 21  # of a larger weight as many are measured: its first rows
# What comes first of the ways is taken unless another is faster by so much: less is noise on a busy machine.
MARGIN = 1.1
LOCK_TIMEOUT = 10.0  # seconds that another process may take to measure
SETTINGS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")  # they change what is measured

Ways = Mapping[str, Callable[[Tensor], LinearMethod | None]]


class ProductChoice:
    """Answers for weights of one machine, thread count and dtype. All its processes get the same answers.

    That is what makes replicas of one machine round alike. Without a folder that answers can be kept in, or where
    another process measures for too long, nothing is measured, and the first of the ways is taken.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        folder = cache_folder("products")
        self._file = None if folder is None else folder / f"{_machine(dtype)}.json"
        self._known: dict[str, str] = {} if self._file is None else _read(self._file)

    def fastest(self, weight: Tensor, ways: Ways) -> str:
        """Return the name of the fastest of `ways` to multiply by `weight` [out, in]. The first is the usual one."""
        first, *others = ways
        if not others or self._file is None:
            return first
        question = f"{weight.shape[0]}x{weight.shape[1]} {' '.join(ways)}"
        if question not in self._known:
            self._ask(self._file, question, weight, ways)
        return self._known.get(question, first)

    def _ask(self, file: Path, question: str, weight: Tensor, ways: Ways) -> None:
        try:
            with locked(file.with_suffix(".lock"), LOCK_TIMEOUT):
                self._known |= _read(file)  # another process may have been here
                if question not in self._known:
                    with as_in_steps():
                        self._known[question] = _measured(weight, ways)
                    _write(file, self._known)
        except OSError as error:  # full, or held by a process that stands still
            logger.warning("products are not measured, the usual way is taken: %s", error)
            self._file = None


@torch.inference_mode()
def _measured(weight: Tensor, ways: Ways) -> str:
    """Return the way that falls behind the fastest by least, at the one of `ROWS` where it falls behind most.

    The first of `ways` is taken where it is within `MARGIN` of that.
    """
    part = weight if weight.numel() <= MOST_WEIGHTS else weight[: max(1, MOST_WEIGHTS // weight.shape[1])]
    methods = {name: method for name, make in ways.items() if (method := make(part)) is not None}
    worst = dict.fromkeys(methods, 1.0)  # times as long as the fastest
    for rows in ROWS:
        x = torch.randn(rows, part.shape[1], dtype=part.dtype)
        least = dict.fromkeys(methods, inf)
        for _ in range(1 + ROUNDS):  # in turns; the first is never the least
            for name, method in methods.items():
                began = time.perf_counter()
                method.apply(x, None)
                least[name] = min(least[name], time.perf_counter() - began)
        best = min(least.values())
        for name, seconds in least.items():
            worst[name] = max(worst[name], seconds / best)
    return next(name for name, ratio in worst.items() if ratio <= MARGIN * min(worst.values()))


def _machine(dtype: torch.dtype) -> str:
    """Return a name for all that decides how fast a product is."""
    settings = [f"{name}={os.environ.get(name)}" for name in SETTINGS]
    parts = (*processor(), chosen_isa(), *settings, torch.__version__, torch.get_num_threads(), dtype)
    sources = b"".join(file.read_bytes() for file in sorted(FOLDER.glob("*.[ch]")))
    return blake2b(repr(parts).encode() + sources, digest_size=16).hexdigest()


def _read(file: Path) -> dict[str, str]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):  # not there, or cut short when its host went down
        return {}
    return dict(found) if isinstance(found, dict) else {}


def _write(file: Path, answers: Mapping[str, str]) -> None:
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    unfinished.replace(file)
