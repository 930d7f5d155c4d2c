"""Counts the bytes of tensors that are alive while a computation runs, on any device, `meta` included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class LiveBytes(TorchDispatchMode):
    """While entered, notes the storage of each tensor that an operation makes, until it is freed.

    peak: most bytes of them that were alive at one time. What was there before counts only where it is written anew.
    Slow: for measuring, not for serving.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @override
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {leaf.untyped_storage()._cdata for leaf in inputs}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage(), given)
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        """Take a storage in unless it came with the arguments: a view, or what was written in place."""
        if storage._cdata not in given:
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
