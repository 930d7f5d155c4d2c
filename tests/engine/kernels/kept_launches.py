"""Launches a kernel by kept handles and by Triton's dispatch, without a GPU; for test_triton_kernels.py.

Prints what a driver is asked to launch the second time, either way, and how often Triton's dispatch was asked.
"""

from __future__ import annotations

import json
from itertools import count

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.kernels.triton_launch import kept


@kept
@triton.jit(do_not_specialize=["any_number"], do_not_specialize_on_alignment=["any_place"])
def kernel(place, any_place, maybe, number, any_number, fraction, BLOCK: tl.constexpr, ADD: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(place + at * number) + fraction
    if ADD:
        x += tl.load(maybe + at)
    tl.store(any_place + at * any_number, x)


class Driver:
    """Notes what it is asked to launch; programs have numbers in the order in which they were loaded."""

    def __init__(self) -> None:
        self.launched, self.device, self.utils = [], 0, self
        self._loaded = count(1)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 1000 + device

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def load_binary(self, *_):
        return self, next(self._loaded), 32, 0, 1024

    def launcher_cls(self, src, metadata):
        """Return what launches: all but the hooks is noted."""

        def launch(*asked):
            *place, _, _, _ = asked[:9]
            self.launched.append([*place[:5], *map(str, (place[5], *asked[9:]))])

        return launch


FLOATS = torch.zeros(4096)
FIRST = (FLOATS, FLOATS, None, 16, 1, 0.5)
CASES = {
    "as before": FIRST,
    "other values of their kind": (FLOATS[64:], FLOATS[3:], None, 32, 7, 0.25),
    "another dtype": (FLOATS.half(), FLOATS, None, 16, 1, 0.5),
    "an address that does not divide by 16": (FLOATS[1:], FLOATS, None, 16, 1, 0.5),
    "a number that does not divide by 16": (FLOATS, FLOATS, None, 17, 1, 0.5),
    "one": (FLOATS, FLOATS, None, 1, 1, 0.5),
    "a number of 64 bits": (FLOATS, FLOATS, None, 1 << 40, 1, 0.5),
    "any number of 64 bits": (FLOATS, FLOATS, None, 16, 1 << 33, 0.5),
    "a tensor for nothing": (FLOATS, FLOATS, FLOATS, 16, 1, 0.5),
}


def main() -> None:
    driver, asked = Driver(), []
    triton.runtime.driver.set_active(driver)
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **kwargs: (asked.append(self), run(self, *args, **kwargs))[1]
    settings = {"BLOCK": 16, "ADD": False}
    cases = [(name, args, settings) for name, args in CASES.items()]
    cases.append(("another constant", FIRST, {"BLOCK": 32, "ADD": False}))
    cases.append(("more warps", FIRST, settings | {"num_warps": 8}))
    cases.append(("another GPU", FIRST, settings))
    for name, args, constants in cases:
        driver.device = 1 if name == "another GPU" else 0
        for launch in (kernel[3, 2], kernel[3, 2], kernel.kernel[3, 2, 1]):
            before = len(asked)
            launch(*args, **constants)
            dispatched = len(asked) - before
            print(json.dumps({"case": name, "launched": driver.launched[-1], "dispatched": dispatched}))


if __name__ == "__main__":
    main()
