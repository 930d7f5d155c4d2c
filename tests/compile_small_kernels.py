"""Compiles the small kernels for a GPU that need not be here: python -m tests.compile_small_kernels 90.

To be run with TRITON_INTERPRET=0. Prints a line per kernel; left: loads that each wait for one leaves on their way.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import triton_draw as draw
from engine.kernels import triton_draw as filters
from engine.kernels import triton_kernels as small
from engine.kernels import triton_linear as linear
from engine.kernels import triton_linear as quantised
from engine.kernels.triton_linear import tiling_of

Kernel = tuple[object, dict[str, str], dict[str, object], int, int]  # kernel, types, constants, warps, stages


def norms() -> Iterator[Kernel]:
    pointers = dict.fromkeys(("x", "residual", "weight", "out"), "*bf16")
    for add in (False, True):
        constants = {"ADD": add, "BLOCK": 1024} | ({} if add else {"residual": None})
        yield small._norm_kernel, {**pointers, "size": "i32", "eps": "fp32"}, constants, 4, 3
    types = {"heads": "*bf16", "norms": "*bf16", "angles": "*fp32"}
    types |= {"token_stride": "i32", "num_heads": "i32", "eps": "fp32"}
    constants = {"HALF": 40, "HEADS": 8, "BLOCK": 64, "NORM": True, "ROTATE": True}
    yield small._norm_rotate_kernel, types, constants, 4, 3
    yield small._silu_gate_kernel, {"x": "*bf16", "out": "*bf16", "size": "i32"}, {"BLOCK": 1024}, 4, 3


def draws() -> Iterator[Kernel]:
    """The kernels that draw, for the 2,374 runs of Qwen3's vocabulary."""
    types = dict.fromkeys(
        ("logits", "temperatures", "log_min_ps", "top_ps", "peaks", "masses", "leasts", "totals"), "*fp32"
    )
    types |= dict.fromkeys(("top_ks", "survivors", "counts", "tokens", "rows", "bits"), "*i32") | {"keys": "*i64"}
    types |= dict.fromkeys(("row_stride", "vocab", "first_id", "num_ids", "num_runs", "num_words", "filtered"), "i32")
    yield draw.scan, types, {"RUNS": 64}, 8, 3
    yield filters.bound, types, {"BLOCK": 4096}, 8, 3
    yield filters.restrict, types, {"BLOCK": 4096, "RUNS": 64}, 8, 3
    yield draw.draw_by_gumbel, types, {"BLOCK": 4096, "RUNS_AT_ONCE": 512}, 8, 3
    yield draw.forbid, types, {"BLOCK": 4096}, 8, 3


def products() -> Iterator[Kernel]:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for outs, ins in ((1024, 1024), (151936, 4096)):
            tiling = tiling_of(outs, ins, dtype)
            constants = {"ROWS": tiling.rows, "OUTS": tiling.outs, "INS": tiling.ins, "BIAS": True, "WHOLE": True}
            types = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{name}")
            types |= dict.fromkeys(("rows", "outs", "ins", "x_stride", "weight_stride"), "i32")
            yield linear._multiply, types, constants, tiling.warps, tiling.stages


def quantised_products(architecture: int) -> Iterator[Kernel]:
    types = {"x_ptr": "*bf16", "found_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "stride": "i32", "size": "i32"}
    if architecture >= 89:  # the first with fp8
        yield quantised._quantise_rows, types, {"LIMIT": 448.0, "LEAST": 1e-12, "BLOCK": 4096}, 8, 3
    types = {"x_ptr": "*bf16", "weight_ptr": "*i8", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    types |= dict.fromkeys(("rows", "outs", "ins", "x_stride"), "i32")
    yield quantised._multiply_int8, types, {"ROWS": 16, "OUTS": 16, "INS": 128, "BIAS": True}, 4, 4


def compile_for(kernel, types, constants, warps, stages, architecture):
    """Return the compiled kernel: as for addresses and sizes that divide by 16, which models have."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    sizes = set(names) - set(constants) - set(kernel.do_not_specialize)
    aligned = [name for name in sizes if signature[name] == "i32" or signature[name].startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


if __name__ == "__main__":
    for launched, *how in (*norms(), *draws(), *products(), *quantised_products(int(sys.argv[1]))):
        kernel = launched.kernel
        made = compile_for(kernel, *how, int(sys.argv[1]))
        found = {"kernel": kernel.__name__, "constants": how[1], "shared": made.metadata.shared}
        found["left"] = [int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", made.asm["ptx"])]
        print(json.dumps(found))
