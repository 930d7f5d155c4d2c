"""What a rank runs that is out of step with the others."""

from __future__ import annotations

import torch

from parallel.group import Group


def sums_of_eight(group: Group) -> None:
    """Take part in a sum of eight numbers, whatever the others do."""
    group.all_reduce(torch.ones(8))
