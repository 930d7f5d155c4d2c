"""Rotary positions of a model of transformers, found by what they compute and computed by our kernels.

The attention modules of most models call one function with queries, keys, cosines and sines. Each such function is
tried on random numbers. Where it turns the halves of a head against each other (Su et al., RoFormer, as GPT-NeoX lays
features out), the module's `forward` gets ours under the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.transformers.attention import Call, PagedAttention, Step

Rotate = Callable[..., tuple[Tensor, Tensor]]
TOLERANCE = 1e-5


def replace_rotations(
    model: nn.Module, calls: Sequence[Call], layers: Iterable[PagedAttention], step: Step
) -> tuple[Counter[str], Counter[str]]:
    """Have the modules that attend rotate by our kernels, where their rotation is recognised.

    Returns how many modules of each class do now, and how many others call a function with cosines of their own.
    """
    known: dict[Callable[..., Any], bool] = {}
    replaced: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for call, layer in zip(calls, layers, strict=True):
        if call.turn or call.written_out:  # its `forward` is ours already
            continue
        module = model.get_submodule(call.path)
        forward, name = type(module).forward, type(module).__name__
        functions = _functions_of(forward)
        for function in functions.values():
            if function not in known:
                known[function] = is_rotation(function)
        ours = {one: partial(rotate, layer, step, function) for one, function in functions.items() if known[function]}
        if ours:
            object.__setattr__(module, "forward", MethodType(_with_names(forward, ours), module))
            replaced[name] += 1
        elif any("cos" in function.__code__.co_varnames for function in functions.values()):
            left[name] += 1
    return replaced, left


def is_rotation(function: Callable[..., Any]) -> bool:
    """Whether function(queries, keys, cosines, sines) rotates halves of heads [1, heads, num_tokens, head_dim]."""
    generator = torch.Generator("cpu").manual_seed(0)
    query = torch.randn(1, 4, 3, 8, generator=generator, device="cpu")
    key = torch.randn(1, 2, 3, 8, generator=generator, device="cpu")
    cos, sin = torch.randn(2, 1, 3, 8, generator=generator, device="cpu")
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = function(query.clone(), key.clone(), cos, sin)
    except Exception:  # a function with other arguments is none
        return False
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    return all(
        isinstance(one, Tensor)
        and one.shape == heads.shape
        and torch.allclose(one, _turned(heads, cos, sin), rtol=TOLERANCE, atol=TOLERANCE)
        for one, heads in zip(found, (query, key), strict=True)
    )


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def _functions_of(forward: Callable[..., Any]) -> dict[str, FunctionType]:
    """Return the functions of its own file that a method calls by name."""
    if not isinstance(forward, FunctionType):
        return {}
    named = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return {name: value for name, value in named.items() if isinstance(value, FunctionType)}


def _with_names(forward: Any, names: dict[str, Any]) -> FunctionType:
    """Return a function that does what `forward` does, with other meanings of some names of its file."""
    known = {**forward.__globals__, **names}
    made = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def rotate(
    layer: PagedAttention,
    step: Step,
    plain: Rotate,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *others: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Rotate heads [1, heads, num_tokens, head_dim] by cosines and sines [1, num_tokens, head_dim].

    plain: the model's own function, for what our kernels are not made for.
    """
    size, tokens = layer.head_dim, query.shape[2]
    fits = query.shape[-1] == key.shape[-1] == size and key.shape[2] == tokens and cos.shape == (1, tokens, size)
    rotation = step.rotation(cos, sin, layer.kernels) if fits and not others and not named else None
    if rotation is None:
        return plain(query, key, cos, sin, *others, **named)
    # A copy: models may use what they hand over once more, as those whose keys are their values do.
    heads = torch.cat((query[0].transpose(0, 1), key[0].transpose(0, 1)), dim=1)
    turned = layer.kernels.norm_rotate(heads, None, rotation, 0.0).transpose(0, 1).unsqueeze(0)
    first, second = turned.split((query.shape[1], key.shape[1]), dim=1)
    return first, second
