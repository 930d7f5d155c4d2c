"""Products with weights packed once for this CPU, of the dtype of the activations or narrower (multiply.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import E4M3, FourBits
from engine.kernels.compiler import load_library
from parallel.c_library import Proof
from parallel.linear import LinearMethod

WIDE = 64  # outputs of one panel of packed weights, as in multiply.c
MIDDLE = 8  # of codes of four bits
NAN, E4M3_UNIT = 0x7F, 256  # of e4m3: the bits of what is no number, and as in panel_scales.h
HELD = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    E4M3,
)  # what scales are held in, as in panel_scales.h
EXPONENT, EXPONENT_AT = 0x7F800000, 23  # of fp32
ONE = 127  # as an exponent
PROVED = (1, 2, 3, 4, 6, 13)  # rows that are compared with those of more
LEAST_GROUP = 32  # inputs of eight bits that share a scale: of fewer, scales would take as much as the weight


def product_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the products of activations in `dtype`, float32 or bfloat16, or None where they cannot be compiled.

    They are the same for every model, and take most of the time that compiling takes.
    """
    library = load_library(("multiply.c",), {"BF16": int(dtype is torch.bfloat16), "AMX": 1}, _proof(dtype))
    if library is not None:
        _declare(library)
    return library


def _proof(dtype: torch.dtype) -> Proof:
    """Return what compares rows alone with the same in company, for every kind of weight."""

    def prove(library: ctypes.CDLL) -> str | None:
        _declare(library)
        generator = torch.Generator().manual_seed(0)
        for ins in (2112, 80):  # more than a strip; no multiple of what the matrix unit takes
            x = torch.randn(40, ins, generator=generator).to(dtype)
            for method in kinds(library, ins, dtype, generator):
                whole = method.apply(x, None)
                if not all(torch.equal(method.apply(x[:rows], None), whole[:rows]) for rows in PROVED):
                    return f"a row of {dtype} times {method.describe()} has other bits among others than alone"
        return None

    return prove


def kinds(library: ctypes.CDLL, ins: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[LinearMethod]:
    """Return products by a weight of each kind; ins: a multiple of 16."""
    outs, groups = WIDE + 6, ins // 16
    plain = torch.randn(outs, ins, generator=generator)
    codes = torch.randint(0, 256, (outs, ins), dtype=torch.uint8, generator=generator)
    scales, zeros = torch.rand(outs, groups, generator=generator), codes[:, :groups] % 17
    yield NativeLinear(library, plain.to(dtype), 1)
    yield NativeInt8Linear(library, codes.view(torch.int8), scales[:, 0], dtype, 1)
    for fours in (FourBits(codes[:, ::2], scales, zeros), FourBits(codes[:, ::2], scales)):
        yield NativeFourBitLinear(library, fours, dtype, 1)
    if ins % LEAST_GROUP == 0:
        for eights in (plain.to(E4M3), codes.view(torch.int8)):
            yield NativeBlockLinear(library, eights, scales[:, : ins // LEAST_GROUP], dtype, 1)


def _declare(library: ctypes.CDLL) -> None:
    library.may_multiply_by_tiles.argtypes = library.packing_depth.argtypes = library.holds_halves.argtypes = ()
    library.multiplies_by_tiles.argtypes = library.scales_sums.argtypes = (c_int64, c_int)
    library.packing_depth.restype = c_int64
    sizes = (c_int64,) * 2
    library.pack.argtypes = library.pack8.argtypes = (c_void_p, c_void_p, *sizes)
    library.pack4.argtypes = library.pack8_by_groups.argtypes = (c_void_p, c_void_p, *sizes, c_int)
    library.multiply.argtypes = (c_void_p, c_int64, *(c_void_p,) * 3, *(c_int64,) * 4, c_int)
    library.multiply8.argtypes = (c_void_p, c_int64, *(c_void_p,) * 4, *(c_int64,) * 4, c_int)
    library.multiply4.argtypes = (c_void_p, c_int64, *(c_void_p,) * 6, *(c_int64,) * 7, c_int)
    library.multiply8_by_groups.argtypes = (c_void_p, c_int64, *(c_void_p,) * 4, *(c_int64,) * 7, c_int)
    for name in ("", "8", "4", "8_by_groups"):
        getattr(library, f"pack{name}").restype = getattr(library, f"multiply{name}").restype = None


class PanelLinear(LinearMethod):
    """What multiplies by panels, which do not keep the weight they were made from.

    A row has the same bits whatever the number of rows, and no row count needs a preparation of its own. Where dot
    products of bfloat16 take two inputs at a time, sums of groups that share a scale are scaled as a whole.

    multiply: the function in C. shape: of the weight, [out, in]. `_addresses`: of all that it reads of the weight.
    `_ending`: what it takes behind rows, outputs and inputs.
    """

    _addresses: tuple[int | None, ...]

    def __init__(
        self,
        library: ctypes.CDLL,
        multiply: Callable[..., None],
        shape: Sequence[int],
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        self._outs, self._ins = shape
        self._dtype = dtype
        self._multiply = multiply
        self._tiles = library.may_multiply_by_tiles()
        tiled = library.multiplies_by_tiles(self._ins, self._tiles)
        depth = library.packing_depth()
        self._way = "by tiles" if tiled else f"{depth} inputs at a time"
        self._scales_sums = bool(library.scales_sums(self._ins, self._tiles))
        self._halves = bool(library.holds_halves())
        self._ending: tuple[int, ...] = threads, self._tiles

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        _check(x, self._ins, self._dtype)
        out = x.new_empty(len(x), self._outs)
        offsets = None if bias is None else bias.data_ptr()
        sizes = (len(x), self._outs, self._ins, *self._ending)
        self._multiply(x.data_ptr(), x.stride(0), *self._addresses, offsets, out.data_ptr(), *sizes)
        return out

    @override
    def describe(self) -> str:
        return f"{type(self).__name__} {self._outs}x{self._ins} {self._way}"

    def _in_groups(self, of: int, scales: Tensor) -> str:
        held = str(scales.dtype).removeprefix("torch.")
        return f" in groups of {of}{', scaled whole' if self._scales_sums else ''}, scales in {held}"

    def _narrowed(self, scale: Tensor) -> Tensor:
        """Return scales in fp32 in the fewest bits that hold all of them as they are."""
        bits = scale.contiguous().view(torch.int32)
        if not bool((bits & ~EXPONENT).any()) and bool((bits > 0).all()) and bool(scale.isfinite().all()):
            return (bits >> EXPONENT_AT).to(torch.uint8)
        for dtype in (torch.bfloat16, *((torch.float16,) if self._halves else ())):
            if torch.equal(scale.to(dtype).float(), scale):
                return scale.to(dtype)
        return scale

    def _padded(self) -> int:
        """Outputs of all panels."""
        return -(-self._outs // WIDE) * WIDE


class NativeLinear(PanelLinear):
    """Weights of the dtype of the activations."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, threads: int) -> None:
        super().__init__(library, library.multiply, weight.shape, weight.dtype, threads)
        self._packed = torch.empty(self._padded() * self._ins, dtype=weight.dtype)
        plain = weight.contiguous()  # in a name of its own: a copy must outlive the call
        library.pack(plain.data_ptr(), self._packed.data_ptr(), self._outs, self._ins)
        self._addresses = (self._packed.data_ptr(),)

    @staticmethod
    def supports(library: ctypes.CDLL, weight: Tensor) -> bool:
        """Whether `library` can pack `weight`: inputs may be taken in pairs."""
        return bool(weight.shape[1] % library.packing_depth() == 0)


class NativeInt8Linear(PanelLinear):
    """Weights in int8 with a scale per output. dtype: of the activations.

    The bits are those of the sums in fp32 of x and the whole numbers, times the scale.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, scale: Tensor, dtype: torch.dtype, threads: int) -> None:
        super().__init__(library, library.multiply8, weight.shape, dtype, threads)
        self._packed = torch.empty(self._padded() * self._ins, dtype=torch.int8)
        self._scales = torch.zeros(self._padded())
        self._scales[: self._outs] = scale
        plain = weight.contiguous()
        library.pack8(plain.data_ptr(), self._packed.data_ptr(), self._outs, self._ins)
        self._addresses = self._packed.data_ptr(), self._scales.data_ptr()

    @staticmethod
    def supports(library: ctypes.CDLL, weight: Tensor) -> bool:
        """Whether `library` can pack int8 `weight`: inputs may be taken in pairs."""
        return NativeLinear.supports(library, weight)


class NativeFourBitLinear(PanelLinear):
    """Weights of four bits that groups of inputs scale. dtype: of the activations.

    The results are those of `NativeLinear` with the weights that these stand for, rounded to the dtype, bit for bit,
    but for `whole`, by which sums are multiplied. Without tiles they are not rounded to bfloat16, nor where groups
    are scaled as a whole.
    """

    def __init__(self, library: ctypes.CDLL, weight: FourBits, dtype: torch.dtype, threads: int) -> None:
        super().__init__(library, library.multiply4, weight.shape, dtype, threads)
        self._group, self._floats = weight.group, weight.zero is None
        self._packed = torch.empty(self._padded() * self._ins // 8, dtype=torch.int32)
        codes = weight.codes.contiguous()
        library.pack4(codes.data_ptr(), self._packed.data_ptr(), self._outs, self._ins, self._tiles)
        narrow = weight.scale if weight.scale.dtype in (torch.uint8, E4M3) else self._narrowed(weight.scale_in_fp32())
        self._scales = _in_lanes(narrow, self._padded())
        # Codes are counted from 8: where all zeros are 8, there is nothing to subtract.
        zero = None if weight.zero is None or bool((weight.zero == MIDDLE).all()) else weight.zero
        self._zeros = None if zero is None else _in_lanes(zero.to(torch.int8) - MIDDLE, self._padded())
        unit = E4M3_UNIT if narrow.dtype is E4M3 else 1
        self._of_outputs = None if weight.whole is None else _in_lanes(weight.whole[:, None] * unit, self._padded())
        others = (None if each is None else each.data_ptr() for each in (self._zeros, self._of_outputs))
        self._addresses = self._packed.data_ptr(), self._scales.data_ptr(), *others
        self._ending = self._group, HELD.index(narrow.dtype), int(self._floats), *self._ending

    @staticmethod
    def supports(library: ctypes.CDLL, weight: FourBits) -> bool:
        """Whether `library` can pack such a weight: a word of eight codes has inputs of one group."""
        return bool(weight.group % (8 * library.packing_depth()) == 0)

    @override
    def describe(self) -> str:
        kind = "E2M1 " if self._floats else ""
        return f"{kind}{super().describe()}{self._in_groups(self._group, self._scales)}"


class NativeBlockLinear(PanelLinear):
    """Weights in eight bits, times a scale by blocks; see `Kernels.block_linear` for what they are.

    dtype: of the activations. The results are those of `NativeLinear` with the weights that these stand for, rounded
    to the dtype, bit for bit. Where bfloat16 is widened to fp32, or groups are scaled as a whole, they are not
    rounded.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, scale: Tensor, dtype: torch.dtype, threads: int) -> None:
        super().__init__(library, library.multiply8_by_groups, weight.shape, dtype, threads)
        self._group, self._floats = weight.shape[1] // scale.shape[1], weight.dtype is E4M3
        self._packed = torch.empty(self._padded() * self._ins, dtype=torch.uint8)
        plain = weight.contiguous()
        library.pack8_by_groups(plain.data_ptr(), self._packed.data_ptr(), self._outs, self._ins, self._tiles)
        wide = scale.float() * E4M3_UNIT if self._floats else scale.float()
        narrow = self._narrowed(wide).repeat_interleave(self._outs // len(scale), 0)
        self._scales = _in_lanes(narrow, self._padded())
        self._addresses = self._packed.data_ptr(), self._scales.data_ptr()
        self._ending = self._group, HELD.index(narrow.dtype), int(self._floats), *self._ending

    @staticmethod
    def supports(weight: Tensor, scale: Tensor) -> bool:
        """Whether it can be packed: groups are not so small that scales outgrow the weight, which has no NaN."""
        if weight.shape[1] // scale.shape[1] % LEAST_GROUP:
            return False
        return weight.dtype is torch.int8 or not bool((weight.view(torch.uint8) & NAN == NAN).any())

    @override
    def describe(self) -> str:
        kind = "fp8" if self._floats else "int8"
        return f"{kind} {super().describe()}{self._in_groups(self._group, self._scales)}"


def _in_lanes(of_groups: Tensor, padded: int) -> Tensor:
    """Return [out, groups] as C reads it: [padded / WIDE, groups, WIDE], 0 or an exponent of 1 behind the last."""
    outs, groups = of_groups.shape
    lanes = of_groups.new_zeros(padded, groups)
    lanes[:outs] = of_groups
    if of_groups.dtype is torch.uint8:
        lanes[outs:] = ONE  # 0 would be 2^-127, and products with it below the normal numbers, which take long
    return lanes.view(-1, WIDE, groups).transpose(1, 2).contiguous()


def _check(x: Tensor, width: int, dtype: torch.dtype) -> None:
    """Raise `ValueError` for rows that C would read past the end of."""
    if x.shape[1] != width or x.dtype is not dtype or x.stride(1) != 1:
        wanted = f"[rows, {width}] of {dtype} with adjacent features"
        raise ValueError(f"x is {list(x.shape)} of {x.dtype} with strides {x.stride()}; {wanted} is multiplied here")
