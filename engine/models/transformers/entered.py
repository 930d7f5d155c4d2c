"""Which module of a model is computing."""

from __future__ import annotations

from torch import nn


class Entered:
    """Follows which module of a model is computing, by hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._inside: list[nn.Module] = []
        for part in model.modules():
            part.register_forward_pre_hook(self._enter)
            part.register_forward_hook(self._leave, always_call=True)

    def current(self) -> nn.Module:
        """Return the innermost module that computes."""
        return self._inside[-1]

    def _enter(self, module: nn.Module, _: object) -> None:
        self._inside.append(module)

    def _leave(self, module: nn.Module, *_: object) -> None:
        if self._inside and self._inside[-1] is module:
            self._inside.pop()
