"""Launches what updates recurrent states at real shapes, for the compiler: run by test_triton_recurrent.py."""

import torch

from engine.kernels.recurrent import StateRows
from engine.kernels.triton_recurrent import outer_product_state, short_conv, unit_heads
from tests.triton_compiler import instead_of_launching, show

# Groups, heads, depth and width of states: Qwen3-Next, Nemotron-H, Granite 4.
CASES = [("delta net", 16, 32, 128, 128), ("nemotron", 8, 128, 128, 64), ("granite", 1, 48, 256, 64)]


def launch(case, groups, heads, depth, width):
    rows = StateRows(*(torch.zeros(each, dtype=torch.int32) for each in (5, 4, 4)))
    channels = 2 * groups * depth + heads * width
    x, pairs = torch.zeros(4, channels, dtype=torch.bfloat16), torch.zeros(4, groups, depth)
    value, rates = torch.zeros(4, heads, width, dtype=torch.bfloat16), torch.zeros(4, heads)
    with instead_of_launching(90) as kernels:
        short_conv(x, torch.zeros(4, channels), torch.zeros(channels), torch.zeros(1, 3, channels), rows, True)
        short_conv(x, torch.zeros(3, channels), None, torch.zeros(1, 2, channels), rows, False)
        unit_heads(pairs.bfloat16(), 1e-6, 1.0)
        state = torch.zeros(1, heads, depth, width)
        outer_product_state(pairs, pairs, value, rates, rates, state, rows, case == "delta net")
    for name, kernel in {kernel.hash: (name, kernel) for name, kernel in kernels}.values():
        show(case, name, kernel)


if __name__ == "__main__":
    for one in CASES:
        launch(*one)
