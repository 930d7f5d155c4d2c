"""Layers with a recurrent state in torch's own operations: a loop over tokens, for machines without a compiler.

Each token is computed by itself, in tensors whose shapes do not depend on the step: so its bits do not depend on
where a sequence is cut, or on what else is in its step. What is compiled from recurrent.c needs no loop in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which tokens of a step belong together, and where the recurrent state of each row is; all int32.

    A row's tokens are computed one after another from the state in slot `sources`, -1 = all zeros, and the state
    after them is written to slot `targets`. No two rows have one target, and none is a source of another row.
    """

    starts: Tensor  # [num_reqs + 1]  first token of each row
    sources: Tensor  # [num_reqs]
    targets: Tensor  # [num_reqs]


def spans(rows: StateRows) -> Iterator[tuple[int, int, int, int]]:
    """Yield each row's first token, the one beyond its last, and the slots that its state comes from and goes to."""
    starts = rows.starts.tolist()
    yield from zip(starts, starts[1:], rows.sources.tolist(), rows.targets.tolist(), strict=False)


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool) -> Tensor:
    """Return a causal convolution of each channel by itself; as `Kernels.short_conv`."""
    out = x.new_empty(x.shape)
    if x.is_meta:
        return out
    for first, beyond, source, target in spans(rows):
        window = torch.zeros_like(state[target]) if source < 0 else state[source].clone()
        for token in range(first, beyond):
            window = torch.cat((window, x[token : token + 1].float()))
            total = weight[0] * window[0] if bias is None else bias + weight[0] * window[0]
            for tap in range(1, len(weight)):
                total = total + weight[tap] * window[tap]
            out[token] = F.silu(total) if silu else total
            window = window[1:]
        state[target] = window
    return out


def unit_heads(x: Tensor, eps: float, scale: float) -> Tensor:
    """Return each head's vector in fp32 as long as `scale`; as `Kernels.unit_heads`."""
    if x.is_meta:
        return x.float()
    wide = [token.float() for token in x]
    made = [token * (scale * torch.rsqrt(token.square().sum(-1, keepdim=True) + eps)) for token in wide]
    return torch.stack(made) if made else x.float()


def outer_product_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    gain: Tensor,
    state: Tensor,
    rows: StateRows,
    delta: bool,
) -> Tensor:
    """Return what is read of states that outer products are added to; as `Kernels.outer_product_state`."""
    out = value.new_empty(value.shape)
    if value.is_meta:
        return out
    each = value.shape[1] // key.shape[1]
    for first, beyond, source, target in spans(rows):
        now = torch.zeros_like(state[target]) if source < 0 else state[source].clone()  # [heads, depth, width]
        for token in range(first, beyond):
            q, k = (part[token].repeat_interleave(each, 0).unsqueeze(-1) for part in (query, key))
            now = now * decay[token].view(-1, 1, 1)
            change = value[token].float()
            if delta:
                change = change - (now * k).sum(1)
            now = now + k * (change * gain[token].unsqueeze(-1)).unsqueeze(1)
            out[token] = (now * q).sum(1)
        state[target] = now
    return out
