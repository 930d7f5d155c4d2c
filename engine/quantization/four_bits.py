"""Weights in four bits by groups, activations as they are (W4A16): an eighth of what weights in float32 take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from engine.config import LEAST_GROUP
from engine.errors import CheckpointError, ConfigError
from engine.kernels.base import FourBits, Kernels
from engine.quantization.awq import Awq
from engine.quantization.gptq import Gptq
from engine.quantization.layout import MIDDLE, Layout, dequantised, in_sixteen_bits
from engine.quantization.method import Pack, QuantizedLinear, divided, parts_of, scale_dtype, shared_by
from engine.quantization.mxfp4 import Mxfp4
from engine.quantization.nvfp4 import Nvfp4
from engine.quantization.pack_quantized import PackQuantized
from engine.quantization.spec import FIELD, QuantizationSpec
from engine.quantization.widened import FewRowsLinear, ReorderedLinear, WidenedProduct, widened_codes
from parallel.linear import LinearMethod, ParallelLinear
from parallel.parameter import Recipe, ShardedParameter
from parallel.sharding import Piece

TORCH_GROUPS = (256, 128, 64, 32)
PACKED_ROWS = 256  # a multiple of 64, which torch packs together


def layout_of(spec: QuantizationSpec, ins: int) -> Layout:
    """Return how a checkpoint holds a weight of so many inputs."""
    group = spec.group or ins
    if spec.weights == "mxfp4":
        return Mxfp4(in_blocks=spec.in_blocks)
    if spec.weights == "nvfp4":
        return Nvfp4(modelopt=spec.layout == "modelopt")
    if spec.layout == "awq":
        return Awq(group)
    if spec.layout == "pack-quantized":
        return PackQuantized(group, reordered=spec.reordered, asymmetric=spec.zeros)
    return Gptq(group, reordered=spec.reordered, less_one=spec.layout == "gptq")


def plain_four_bits(spec: QuantizationSpec, outs: int, ins: int, dtype: torch.dtype) -> Recipe:
    """Return how a plain weight [out, in] is made of one in four bits."""
    layout = layout_of(spec, ins)
    if (reason := layout.why_not(outs, ins)) is not None:
        raise CheckpointError(f"{FIELD}: a weight [{outs}, {ins}] cannot be stored so: {reason}")
    codes, scales, zeros = layout.codes(outs, ins), layout.scales(outs, ins), layout.zeros(outs, ins)
    whole = layout.whole(outs)

    def make(read: Mapping[str, Tensor]) -> Tensor:
        zero = None if layout.floats else zeros.make(read)
        of_all = whole.make(read) if layout.has_whole else None
        plain = dequantised(FourBits(codes.make(read), scales.make(read), zero, of_all), dtype)
        if not layout.reordered:
            return plain
        made = torch.empty_like(plain)
        made[:, layout.order(ins).make(read)[0]] = plain
        return made

    tensors = {**codes.tensors, **scales.tensors, **zeros.tensors, **whole.tensors}
    return Recipe(tensors, make, codes.spare)


class FourBitLinear(QuantizedLinear):
    """weight [out, in / 2] of two codes each, weight_scale and weight_zero [out, groups], as `layout` tells.

    There is no `weight_zero` where codes are numbers of E2M1, and a `weight_global_scale` [out] where all of a tensor
    have one scale besides. Where groups are not of adjacent inputs there is `input_order`, too, [parts, in]: codes
    are in that order. Multiplies on any device, by a weight that is made plain for each product; `use_kernels` puts
    a product that reads codes in its place.
    """

    numbers = 2
    widens = True

    def __init__(self, spec: QuantizationSpec) -> None:
        self._spec = spec
        self._group = 0  # inputs that share a scale here; 0 = `create` has not been called
        self._outs = self._ins = 0

    @override
    def create(self, layer: ParallelLinear, name: str) -> None:
        """Raises `CheckpointError` for sizes that are not stored so, `ConfigError` for ones that cannot be split."""
        plain = layer.weight
        full = plain.full_shape()
        layout = self._layout = layout_of(self._spec, full[1])
        for outs in parts_of(plain):
            if (reason := layout.why_not(outs, full[1])) is not None:
                raise CheckpointError(f"{FIELD}: {name} cannot be stored so: {reason}")
        if layout.reordered and plain.axis == 1 and layer.group.size > 1:
            raise ConfigError(
                f"tensor_parallel_size={layer.group.size}: the groups of {name} have inputs of all ranks "
                "(desc_act); use tensor_parallel_size=1, or a checkpoint without desc_act",
                "tensor_parallel_size",
            )
        self._group = shared_by(layout.group, plain, 1)
        if self._group < LEAST_GROUP:
            raise ConfigError(
                f"tensor_parallel_size={layer.group.size}: {name} has {plain.shape[1]} inputs on each rank, which "
                f"cut groups of {layout.group} into ones of {self._group}; use a smaller tensor_parallel_size, or "
                "enable_expert_parallel for experts",
                "tensor_parallel_size",
            )
        self.outline(layer)

    @override
    def outline(self, layer: ParallelLinear) -> None:
        plain = layer.weight
        if self._outs:
            return
        self._outs, self._ins = plain.shape
        self._dtype = plain.dtype  # of activations
        self._order: ShardedParameter | None = None

        def parameter(dtype: torch.dtype, shared: int) -> ShardedParameter:
            pieces = divided(plain.pieces, shared) if plain.axis == 1 else plain.pieces
            shape = (self._outs, self._ins // shared)
            return ShardedParameter.of(shape, dtype, plain.device, plain.axis, pieces)

        layer.weight = parameter(torch.uint8, 2)
        layer.weight_scale = parameter(self._scales_dtype(plain), self._group)
        if not self._layout.floats:
            layer.weight_zero = parameter(torch.uint8, self._group)
        if self._layout.has_whole:
            axis, pieces = (0, plain.pieces) if plain.axis == 0 else (None, ())
            layer.weight_global_scale = ShardedParameter.of((self._outs,), torch.float32, plain.device, axis, pieces)
        if self._layout.reordered:
            self.in_parameters = False
            keys = [piece.key for piece in plain.pieces] if plain.axis == 0 else [""]
            pieces = tuple(Piece(key, 1, 0, 1, at) for at, key in enumerate(keys or [""]))
            shape = (len(pieces), self._ins)
            layer.input_order = ShardedParameter.of(shape, torch.int64, plain.device, 0, pieces)
            self._order = layer.input_order
        self._hold(layer)

    def _scales_dtype(self, plain: ShardedParameter) -> torch.dtype:
        """Return what scales are loaded in; where nothing is, as for a plan, the most that they are held in later."""
        loaded = self._layout.scale_dtype
        if plain.device.type != "meta" or loaded is not torch.float32:
            return loaded
        return scale_dtype(plain.dtype) if self.loads_plain or plain.dtype is torch.float32 else torch.bfloat16

    @override
    def recipe(self, parameter: str, shape: tuple[int, ...]) -> Recipe | None:
        outs, layout = shape[0], self._layout
        if parameter == "weight":
            return layout.codes(outs, 2 * shape[1])
        if parameter == "input_order":
            return layout.order(shape[1])
        if parameter == "weight_global_scale":
            return layout.whole(outs)
        if parameter not in ("weight_scale", "weight_zero"):
            return None
        ins = shape[1] * self._group
        recipe = layout.scales(outs, ins) if parameter == "weight_scale" else layout.zeros(outs, ins)
        # A rank may hold a part of a group.
        times = layout.group // self._group
        return Recipe(recipe.tensors, lambda read: _repeated(recipe.make(read), times), recipe.spare)

    @override
    def load(self, layer: ParallelLinear) -> None:
        layer.weight_scale.data = in_sixteen_bits(layer.weight_scale.data)
        self._hold(layer)
        if self._order is not None and not bool((self._order == self._order[:1]).all()):
            raise CheckpointError(
                f"{FIELD}: groups of inputs (g_idx) differ between query, key and value, or gate and up, which are "
                "one product here"
            )

    def _hold(self, layer: ParallelLinear) -> None:
        zero = None if self._layout.floats else layer.weight_zero
        whole = layer.weight_global_scale if self._layout.has_whole else None
        self._weight = FourBits(layer.weight, layer.weight_scale, zero, whole)
        self._product = WidenedProduct(self._outs, self._ins)

    @override
    def use_kernels(self, layer: ParallelLinear, kernels: Kernels, pack: Pack) -> None:
        faster = kernels.four_bit_linear(self._weight)
        if faster is None and TorchInt4Linear.supports(self._weight, self._dtype):
            faster = TorchInt4Linear(self._weight)
        if faster is None:
            self._product = WidenedProduct(self._outs, self._ins, pack)
            return
        on_cpu = layer.weight.device.type == "cpu"
        ordered = faster if self._order is None else ReorderedLinear(faster, self._order[0].clone())
        layer.method = ordered if on_cpu else FewRowsLinear(ordered, self)
        if on_cpu:
            scales = ("weight_scale", "weight_zero", "weight_global_scale")
            layer.release_weight(*(one for name, one in layer.named_parameters(recurse=False) if name in scales))

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order[0])
        return self._product.apply(x, bias, widened_codes(self._weight, x.dtype))

    @override
    def tensors(self) -> Iterator[Tensor]:
        yield from self._weight.held()
        if self._order is not None:
            yield self._order

    @override
    def describe(self) -> str:
        order = "reordered " if self._order is not None else ""
        kind = "E2M1 " if self._layout.floats else ""
        return f"{order}{kind}FourBitLinear {self._outs}x{self._ins} by {self._group}"


def _repeated(of_groups: Tensor, times: int) -> Tensor:
    """Return each column so many times. Torch copies some numbers of eight bits as bytes alone."""
    numbers = of_groups.view(torch.uint8) if of_groups.itemsize == 1 else of_groups
    return numbers.repeat_interleave(times, 1).view(of_groups.dtype)


class TorchInt4Linear(LinearMethod):
    """Torch's own product of bfloat16 with four bits, for CPUs that the engine's compiled ones are not written for.

    A row has the same bits whatever the number of rows. Scales are rounded to bfloat16. For float32 torch has a
    product, too, which takes longer for one row than making the weight plain.
    """

    def __init__(self, weight: FourBits) -> None:
        if weight.zero is None:
            raise ValueError("torch multiplies by whole numbers alone")
        codes, scale, zero = weight.codes, weight.scale_in_fp32(), weight.zero
        self._outs = len(codes)
        self._group = _taken_group(weight.group)
        times = weight.group // self._group
        # Whole numbers are wanted in int32, eight times as large, so some rows are packed at a time.
        rows = (torch.stack((part & 0xF, part >> 4), -1).flatten(1).int() for part in codes.split(PACKED_ROWS))
        self._packed = torch.cat([torch.ops.aten._convert_weight_to_int4pack_for_cpu(part, 1) for part in rows])
        # Torch's is (code - 8) * scale + offset.
        offset = (MIDDLE - zero.float()) * scale
        both = torch.stack((scale, offset), -1).repeat_interleave(times, 1)
        self._scales = both.transpose(0, 1).to(torch.bfloat16).contiguous()

    @staticmethod
    def supports(weight: FourBits, dtype: torch.dtype) -> bool:
        """Whether torch multiplies by such a weight, and fast, on this machine."""
        outs, whole_numbers = weight.shape[0], weight.zero is not None
        fast = weight.codes.device.type == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        there = whole_numbers and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        return fast and there and dtype is torch.bfloat16 and not outs % 16 and _taken_group(weight.group) > 0

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not len(x):
            return x.new_empty(0, self._outs)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        out: Tensor = product(x.contiguous(), self._packed, self._group, self._scales)
        return out if bias is None else out.add_(bias)

    @override
    def describe(self) -> str:
        return f"TorchInt4Linear by {self._group}"


def _taken_group(group: int) -> int:
    """Return the largest of torch's sizes of groups that a group can be cut into, 0 = none."""
    return next((size for size in TORCH_GROUPS if group % size == 0), 0)
