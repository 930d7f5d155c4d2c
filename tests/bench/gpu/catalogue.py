"""All parts of the bench, in the order in which they run and are told: what matters most comes first."""

from __future__ import annotations

from tests.bench.gpu import (
    part_attention,
    part_checks,
    part_decode,
    part_kernels,
    part_limits,
    part_load,
    part_parity,
    part_prefill,
    part_products,
    part_skew,
    part_start,
    part_toggles,
    part_tuning,
)
from tests.bench.gpu.figures import Part
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.shapes import LLAMA_1B, QWEN3_06B, QWEN3_8B

SMALL, LLAMA, LARGE = QWEN3_06B.name, LLAMA_1B.name, QWEN3_8B.name


def catalogue(scale: Scale) -> list[Part]:
    """Return the parts at this scale: first what must be right, then the limits, since shares are told of them.

    Then what the engine is aimed at, and after that what takes long or explains it: minutes may be few.
    """
    (small, their_small), (large, their_large) = (part_load.parts(scale, name) for name in (SMALL, LARGE))
    return [
        *part_checks.parts(),
        part_limits.PART,
        part_parity.part(scale, SMALL),
        small,
        part_decode.part(scale, SMALL),
        part_skew.part(scale, SMALL),
        part_tuning.part(scale),
        part_attention.part(scale),
        large,
        part_decode.part(scale, LARGE),
        part_skew.part(scale, LARGE),
        part_prefill.part(scale, LARGE),
        part_start.part(scale, LARGE),
        their_small,
        their_large,
        *(part_parity.part(scale, name) for name in (LLAMA, LARGE)),
        part_products.part(scale),
        part_kernels.part(scale),
        *(part_toggles.part(scale, name) for name in (SMALL, LARGE)),
    ]
