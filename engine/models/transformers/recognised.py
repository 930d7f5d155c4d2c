"""Norms and gated feed-forwards of a model of transformers, found by what they compute and computed by our kernels.

No list of names: a module's own `forward` is run on the CPU over a few random numbers, its linear layers replaced by
stubs that return some, and what comes out decides. What is not recognised stays as it is.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from engine.layers.base import Build, Layer
from engine.layers.mlp import ACTIVATIONS, Gate
from engine.layers.norm import RMSNorm
from parallel.linear import MergedColumnParallelLinear, RowParallelLinear

logger = logging.getLogger(__name__)

GATES = ("silu", "gelu_pytorch_tanh")  # that our kernels compute
WIDTH = 8  # of the numbers that stubs return
LARGE = 100.0
TOLERANCE = 1e-5


@dataclass(slots=True)
class Replaced:
    """How many modules of each class of transformers were replaced, and how many of the same kind were left."""

    norms: Counter[str] = field(default_factory=Counter)
    gates: Counter[str] = field(default_factory=Counter)
    rotations: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)

    def log(self) -> None:
        """Write the line of the start."""

        def text(counts: Counter[str]) -> str:
            return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"

        logger.info(
            "computed by our kernels: norms %s; gated feed-forwards %s; rotations %s; left to transformers: %s",
            text(self.norms),
            text(self.gates),
            text(self.rotations),
            text(self.left),
        )


class KernelNorm(RMSNorm):
    """An RMSNorm of transformers over the last dimension, for inputs of any shape before it."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


@dataclass(frozen=True, slots=True)
class GatedForm:
    """What a gated feed-forward calls its linear layers. up: gate and up, or the one that is both side by side."""

    up: tuple[str, ...]
    down: str
    activation: str


class KernelMLP(Layer):
    """A gated feed-forward of transformers, gate and up in one product, for inputs of any shape."""

    def __init__(self, old: nn.Module, form: GatedForm, build: Build) -> None:
        super().__init__()
        linears = _linears(old)
        first, last = linears[form.up[0]], linears[form.down]
        inner, group, dtype = last.in_features, build.group, build.dtype
        self.form, self.gate = form, Gate(form.activation)
        self.up = MergedColumnParallelLinear(first.in_features, [inner, inner], first.bias is not None, group, dtype)
        self.down = RowParallelLinear(inner, last.out_features, last.bias is not None, group, dtype)

    def names(self, prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the linear layers, with what a checkpoint calls them piece by piece. prefix: what it calls this."""
        for inner, names in (("up", self.form.up), ("down", (self.form.down,))):
            yield inner, tuple(f"{prefix}.{name}" for name in names)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(self.up(x.flatten(0, -2)))).unflatten(0, x.shape[:-1])


def recognise(
    model: PreTrainedModel, style: Callable[[str], str], wide: Mapping[str, object], build: Build
) -> Replaced:
    """Put our layers in the place of what is recognised, before linear layers are replaced.

    style: how a module or parameter is split over the ranks. wide: parameters that are not of the model's dtype.
    """
    replaced = Replaced()
    norms: dict[tuple[object, ...], tuple[float, float] | None] = {}
    forms: dict[tuple[object, ...], GatedForm | None] = {}
    for path, module in list(model.named_modules()):
        name = type(module).__name__
        if _has_one_weight(module):
            key = (type(module), module.weight.shape, *_numbers(module))
            if key not in norms:
                norms[key] = norm_of(module)
            found = norms[key]
            whole = style(f"{path}.weight") == style(path) == "replicate" and f"{path}.weight" not in wide
            if found is not None and whole:
                offset, eps = found
                put(model, path, KernelNorm(len(module.weight), eps, build, offset=offset))
            (replaced.norms if found is not None and whole else replaced.left)[name] += 1
            continue
        if hasattr(module, "_apply_gate") and is_silu_gate(module._apply_gate):
            replaced.gates[name] += 1  # that `StackedExperts` computes
            continue
        alike = _shape_of(module)
        if alike and alike not in forms:
            forms[alike] = gated_form(module)
        if form := forms.get(alike):
            ways = [style(f"{path}.{child}") for child in (*form.up, form.down)]
            split = build.group.size == 1 or (len(form.up) == 2 and ways == ["colwise", "colwise", "rowwise"])
            plain = not any(f"{path}.{child}.weight" in wide for child in (*form.up, form.down))
            if split and plain:
                put(model, path, KernelMLP(module, form, build))
            (replaced.gates if split and plain else replaced.left)[name] += 1
    return replaced


def norm_of(module: nn.Module) -> tuple[float, float] | None:
    """Return offset and epsilon of the RMSNorm that a module is, None where it is none; its weight is [size]."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = len(module.weight)  # type: ignore[arg-type]
    weight, x = (torch.randn(rows, size, generator=generator, device="cpu") for rows in (1, 3))
    twin = copy.copy(module)
    twin._parameters = {"weight": nn.Parameter(weight[0], requires_grad=False)}
    # With small inputs epsilon counts, with large ones whatever holds them within bounds.
    inputs = (x, x * 1e-3, x * LARGE)
    try:
        with torch.no_grad(), torch.device("cpu"):
            outputs = [twin(one.unsqueeze(0))[0] for one in inputs]
    except Exception:  # a module with another signature is no norm
        return None
    for eps in _numbers(module):
        for offset in (0.0, 1.0):
            normed = [one * torch.rsqrt(one.square().mean(-1, keepdim=True) + eps) for one in inputs]
            expected = [one * (weight + offset) for one in normed]
            if all(map(_same, outputs, expected)):
                return offset, eps
    return None


def gated_form(module: nn.Module) -> GatedForm | None:
    """Return what a module calls the linear layers of a gated feed-forward, None where it is none."""
    linears = _linears(module)
    for down, last in linears.items():
        up = tuple(name for name in linears if name != down)
        sizes = {(linears[name].in_features, linears[name].out_features) for name in up}
        if sizes != {(last.out_features, last.in_features * (3 - len(up)))}:
            continue
        if len({linears[name].bias is None for name in up}) > 1:
            continue
        for order in dict.fromkeys((up, up[::-1])):
            for activation in GATES:
                if _computes(module, GatedForm(order, down, activation)):
                    return GatedForm(order, down, activation)
    return None


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: part for name, part in module.named_children() if isinstance(part, nn.Linear)}


def _shape_of(module: nn.Module) -> tuple[object, ...]:
    """Return what modules that compute the same have in common; () for one that is no feed-forward."""
    linears = _linears(module)
    others = [part for name, part in module.named_children() if name not in linears]
    if (
        len(linears) not in (2, 3)
        or module._parameters
        or module._buffers
        or any(part._parameters for part in others)
    ):
        return ()
    sizes = tuple((name, part.in_features, part.out_features, part.bias is None) for name, part in linears.items())
    numbers = tuple(value for value in vars(module).values() if isinstance(value, float))
    return type(module), sizes, numbers, *map(type, others)


class _Stub(nn.Module):
    """In the place of a linear layer: keeps what it gets, and returns what it was given."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out, self.got = out, out

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.got = x
        return self.out


def _computes(module: nn.Module, form: GatedForm) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    x, gate, up, result = torch.randn(4, 1, 3, WIDTH, generator=generator, device="cpu") * _scales()
    given = [torch.cat((gate, up), dim=-1)] if len(form.up) == 1 else [gate, up]
    stubs = {name: _Stub(out) for name, out in zip((*form.up, form.down), (*given, result), strict=True)}
    twin = copy.copy(module)
    twin._modules = {**module._modules, **stubs}
    try:
        with torch.no_grad(), torch.device("cpu"):
            returned = twin(x)
    except Exception:  # a module with another signature is none
        return False
    if not isinstance(returned, Tensor) or not all(stubs[name].got is x for name in form.up):
        return False
    return _same(returned, result) and _same(stubs[form.down].got, ACTIVATIONS[form.activation](gate) * up)


def is_silu_gate(compute: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function of gate and up side by side is silu(gate) * up."""
    x = torch.randn(3, 2 * WIDTH, generator=torch.Generator("cpu").manual_seed(0), device="cpu") * _scales()
    gate, up = x.chunk(2, dim=-1)
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = compute(x)
    except Exception:  # it needs what is not there
        return False
    return _same(found, F.silu(gate) * up)


def _scales() -> Tensor:
    """Return what makes the last of three rows large: some activations are clamped."""
    return torch.tensor([[1.0], [1.0], [LARGE]], device="cpu")


def _same(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _has_one_weight(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    return alone and weight is not None and weight.ndim == 1


def _numbers(module: nn.Module) -> tuple[float, ...]:
    """Return the numbers among a module's attributes that may be an epsilon."""
    return tuple(value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1)


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in the place of the one at `path`."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
