"""What the parity tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import pytest
import torch

from parallel.rendezvous import Rendezvous
from parallel.torch_group import connect


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread and lose much when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
