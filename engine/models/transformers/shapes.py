"""A pass over the device meta through modules that ask for the contents of tensors, such as loops over experts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError


class ShapesAlone:
    """Has modules of a model that ask for contents return what has the shape of their input.

    A wrong shape is found by what comes after. The model is one that is thrown away. called: modules that computed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.called: set[nn.Module] = set()
        self._replaced: set[nn.Module] = set()
        for part in model.modules():
            part.forward = self._over(part, part.forward)

    def check(self, attending: Collection[nn.Module], num_ranks: int = 1) -> None:
        """Refuse a model where a module was left out that has attention, or on several ranks one that is split.

        Raises `CheckpointError`.
        """
        kinds = {type(module) for module in attending}
        for module in self._replaced:
            name = type(module).__name__
            if any(type(part) in kinds for part in module.modules()):
                raise CheckpointError(f"config.json: {name} asks for the contents of tensors")
            axes = {getattr(parameter, "axis", None) for parameter in module.parameters()}
            if num_ranks > 1 and axes != {None}:
                raise CheckpointError(
                    f"config.json: {name} is split and asks for the contents of tensors; use tensor_parallel_size=1"
                )

    def _over(self, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.called.add(module)
            try:
                return plain(*args, **kwargs)
            except RuntimeError as error:
                if "meta" not in str(error) or not args or not isinstance(args[0], Tensor):
                    raise
                self._replaced.add(module)
                self.called.update(module.modules())
                return torch.empty_like(args[0])

        return forward
