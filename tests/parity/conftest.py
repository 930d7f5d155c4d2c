"""What the parity tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.rendezvous import Rendezvous
from parallel.torch_group import connect
from tests.parity.tiny_models import make


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread and lose much when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function that makes each kind of checkpoint once: (model, folder)."""
    made = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = make(name, folder), folder
        return made[name]

    return get


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Calls a function with each rank's group and more, both ranks at once, as threads of this process."""
    with ThreadPoolExecutor(2) as threads:
        rendezvous = Rendezvous.create()
        places = (rendezvous, rendezvous.address)
        joining = [threads.submit(connect, rank, 2, places[rank], "cpu", 60.0) for rank in range(2)]
        groups = [each.result() for each in joining]
        yield lambda function, *values: list(threads.map(function, groups, *map(repeat, values)))
        for group in groups:
            group.close()
