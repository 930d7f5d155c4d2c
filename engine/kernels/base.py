"""What a decoder does beside attention, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from engine.kernels import recurrent
from engine.kernels.recurrent import StateRows
from parallel.linear import LinearMethod, ParallelLinear

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0
LEAST_SCALE = 1e-12  # of a row of zeros, whose quotient must not be 0 / 0
# Rows up to which reading a quantised weight is what a product on a GPU costs. Beyond, making it plain costs less.
FEW_ROWS = 64


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows, size] in e4m3 and the rows' scales [rows, 1] in fp32; x is about the product of both."""
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    # By a number of the host a GPU would not divide: it multiplies by the reciprocal, rounded.
    scale = largest.div_(largest.new_full((1, 1), LARGEST_E4M3)).clamp_(min=LEAST_SCALE)
    return (wide / scale).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3), scale


@dataclass(frozen=True)
class FourBits:
    """A weight [out, in] of four bits whose groups of adjacent inputs share a scale.

    w = (code - zero) * scale, or, where codes are numbers of E2M1 (sign, two bits of exponent, one of mantissa) and
    there are no zeros, E2M1[code] * scale * whole.

    codes: [out, in / 2] uint8, two codes of 0 to 15 in each, that of the even input in the low half. scale: [out,
    groups], in fp32, bfloat16 or float16; in uint8 where all are powers of two: exponents, counted from -127; in e4m3
    where there is a `whole`. zero: [out, groups] uint8, 0 to 16. whole: [out] fp32.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.scale.dtype is E4M3) != (self.whole is not None):
            raise ValueError(f"`whole` goes with scales in e4m3, and with no others; these are {self.scale.dtype}")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.codes), 2 * self.codes.shape[1]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scale.shape[1]

    def rows(self, first: int, last: int) -> FourBits:
        """Return the outputs [first, last)."""
        return FourBits(*(None if each is None else each[first:last] for each in self._all()))  # type: ignore[arg-type]

    def held(self) -> list[Tensor]:
        """Return all that it consists of."""
        return [each for each in self._all() if each is not None]

    def _all(self) -> tuple[Tensor | None, ...]:
        return self.codes, self.scale, self.zero, self.whole

    def scale_in_fp32(self) -> Tensor:
        """Return the scales of groups, [out, groups] in fp32."""
        scale = self.scale
        return scale.view(torch.float8_e8m0fnu).float() if scale.dtype is torch.uint8 else scale.float()


def dequantised_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of x [rows, in] with weight [out, in] in int8 times scale [out], made plain for it."""
    plain = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
    torch.mul(weight, scale[:, None], out=plain)  # in fp32, rounded once; a GPU writes nothing else
    return F.linear(x, plain, bias)


class GroupedProduct(ABC):
    """Products of rows with weights of their experts, of which the host does not know how many rows each gets."""

    @abstractmethod
    def apply(self, x: Tensor, ends: Tensor, biased: bool = True) -> Tensor:
        """Return each row's product with its expert's weight, [rows, out] in x's dtype.

        x: [rows, in], in the order of experts. ends: the row behind the last of each expert, [experts] int64. biased:
        whether biases, where there are any, are added.
        """

    def fix_tiling(self) -> None:
        """Let a row's bits depend on nothing but itself from now on, whatever that costs."""
        return


class Kernels(ABC):
    """Products, norms, rotation and gating of flat tokens: contiguous tensors of one dtype, summed in fp32.

    A row's result does not depend on the other rows.
    """

    @abstractmethod
    def linear(self, weight: Tensor) -> LinearMethod | None:
        """Return the best way to multiply by `weight`, [out, in], that these kernels know; None = none of theirs."""

    def int8_linear(self, weight: Tensor, scale: Tensor) -> LinearMethod | None:
        """Return the same for `weight` [out, in] in int8 with `scale` [out] in fp32."""
        return None

    def block_linear(self, weight: Tensor, scale: Tensor) -> LinearMethod | None:
        """Return the same for `weight` [out, in] in e4m3 or int8, times `scale` [out / rows, in / columns] of blocks.

        On a CPU what is returned keeps neither, and a row's bits must not depend on how many rows there are. On a GPU
        it is for at most `FEW_ROWS` rows.
        """
        return None

    def four_bit_linear(self, weight: FourBits) -> LinearMethod | None:
        """Return the same for a weight of four bits.

        On a CPU what is returned keeps none of its tensors, and a row's bits must not depend on how many rows there
        are. On a GPU it is for at most `FEW_ROWS` rows.
        """
        return None

    def grouped_product(self, layers: Sequence[ParallelLinear]) -> GroupedProduct | None:
        """Return what multiplies by the weights of experts in one launch, None = each multiplies by itself.

        layers: loaded, one of each expert, alike in shape and dtype. They may be made views of one tensor.
        """
        return None

    def quantise_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x [rows, size] in e4m3 and the rows' scales [rows, 1] in fp32, as `quantise_rows` of this module."""
        return quantise_rows(x)

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension: x is [num_tokens, size]."""

    @abstractmethod
    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place and return the sum's norm."""

    @abstractmethod
    def rotation(self, angles: Tensor) -> Any:
        """Return what `norm_rotate` needs of a step's cosines and sines, [num_tokens, 2, head_dim / 2] in fp32."""

    @abstractmethod
    def norm_rotate(self, heads: Tensor, norms: Tensor | None, rotation: Any, eps: float) -> Tensor:
        """Norm each head (norms [num_heads, head_dim], None = not) and rotate it (None = not).

        heads: [num_tokens, num_heads, head_dim], tokens may be strided; it may be overwritten by the result.
        """

    @abstractmethod
    def silu_gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up of x = gate | up: [num_tokens, 2 * size] -> [num_tokens, size]."""

    def gelu_gate(self, x: Tensor) -> Tensor:
        """Return the same with gelu(gate), by tanh, in the place of silu(gate)."""
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @abstractmethod
    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool
    ) -> Tensor:
        """Return the causal convolution of each channel by itself, through silu if asked for: [num_tokens, size].

        x: [num_tokens, size], tokens may be strided. weight: [taps, size] fp32, the last for the newest token. bias:
        [size] fp32. state: [slots, taps - 1, size] fp32: the inputs before a row's tokens, oldest first; updated.
        """

    @abstractmethod
    def unit_heads(self, x: Tensor, eps: float, scale: float) -> Tensor:
        """Return x / sqrt(sum(x^2) + eps) * scale over the last dimension, [num_tokens, heads, width] fp32."""

    @abstractmethod
    def outer_product_state(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        gain: Tensor,
        state: Tensor,
        rows: StateRows,
        delta: bool,
    ) -> Tensor:
        """Update states by each token's outer product of key and value, and return what its query reads.

        S = decay * S + key (x) gain * (value - (key . decay * S if delta else 0)); result = query . S. delta: the
        gated delta rule (Yang et al., arXiv 2412.06464); without it the scan of Mamba-2 (arXiv 2405.21060).

        query, key: [num_tokens, groups, depth] fp32, contiguous. value: [num_tokens, heads, width], tokens may be
        strided; heads share groups in order. decay, gain: [num_tokens, heads] fp32, contiguous. state: [slots, heads,
        depth, width] fp32, updated. Returns [num_tokens, heads, width] of the dtype of `value`.
        """


class TorchKernels(Kernels):
    """Torch's own operations, on any device."""

    @override
    def linear(self, weight: Tensor) -> LinearMethod | None:
        return None

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    @override
    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return F.rms_norm(residual, weight.shape, weight, eps)

    @override
    def rotation(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of whole heads, two of [num_tokens, 1, head_dim].

        With x = (a, b) in halves the rotation is (a cos - b sin, b cos + a sin) = x * cos + roll(x) * (-sin, sin).
        """
        cos, sin = angles.split(1, dim=1)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    @override
    def norm_rotate(
        self, heads: Tensor, norms: Tensor | None, rotation: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        if norms is not None:
            heads = F.rms_norm(heads, heads.shape[-1:], None, eps) * norms
        if rotation is None:
            return heads
        cos, sin = (each.to(heads.dtype) for each in rotation)
        return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)

    @override
    def silu_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @override
    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool
    ) -> Tensor:
        return recurrent.short_conv(x, weight, bias, state, rows, silu)

    @override
    def unit_heads(self, x: Tensor, eps: float, scale: float) -> Tensor:
        return recurrent.unit_heads(x, eps, scale)

    @override
    def outer_product_state(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        gain: Tensor,
        state: Tensor,
        rows: StateRows,
        delta: bool,
    ) -> Tensor:
        return recurrent.outer_product_state(query, key, value, decay, gain, state, rows, delta)
