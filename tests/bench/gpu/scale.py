"""How large everything is that is measured: as the issue asks on a GPU, or tiny, to prove the code on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.gpu.loads import Load, nano_vllm
from tests.bench.gpu.shapes import REAL, Shape, tiny


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of all measurements.

    parity_prompts: prompts, their tokens, and tokens generated after each. max_model_len: of the load and of decode
    steps, as graphs are captured for it. context: tokens of context of decode steps; windows x steps of them are
    timed. skew: short sequences, their context, and that of the one long sequence among them. chunk: tokens of a
    prefill step. attention: (batch, context) of the attention kernels of `backends`; paged: those that all block
    sizes of `pages` are measured at. rows: of products. side: of the square product. copy: its bytes.
    """

    name: str
    shapes: tuple[Shape, ...]
    load: Load
    parity_prompts: tuple[int, int, int]
    batches: tuple[int, ...]
    max_model_len: int
    context: int
    warm: int
    windows: int
    steps: int
    skew: tuple[int, int, int]
    chunk: int
    chunks: int
    attention: tuple[tuple[int, int], ...]
    paged: tuple[tuple[int, int], ...]
    backends: tuple[str, ...]
    pages: tuple[int, ...]
    rows: tuple[int, ...]
    side: int
    copy: int
    repeats: int

    def shape(self, name: str) -> Shape:
        """Return the shape that goes by the name of a real one."""
        return next(shape for shape in self.shapes if shape.name == name)


FULL = Scale(
    name="real",
    shapes=REAL,
    load=nano_vllm(),
    parity_prompts=(8, 256, 64),
    batches=(1, 32, 256),
    max_model_len=4096,
    context=1024,
    warm=16,
    windows=3,
    steps=32,
    skew=(64, 1024, 32_768),
    chunk=8192,
    chunks=8,
    attention=((1, 1024), (1, 8192), (1, 32_768), (32, 1024), (32, 8192), (256, 1024), (256, 8192)),
    paged=((32, 8192), (256, 1024)),
    backends=("triton", "flash", "torch_varlen"),
    pages=(16, 64, 256),
    rows=(1, 32, 256, 8192),
    side=8192,
    copy=4 << 30,
    repeats=15,
)
TINY = Scale(
    name="tiny",
    shapes=tuple(tiny(shape) for shape in REAL),
    load=nano_vllm(6, 4, 12),
    parity_prompts=(2, 12, 4),
    batches=(1, 3),
    max_model_len=256,
    context=32,
    warm=2,
    windows=2,
    steps=3,
    skew=(3, 16, 96),
    chunk=64,
    chunks=2,
    attention=((1, 32), (3, 48)),
    paged=((3, 48),),
    backends=("reference", "native"),
    pages=(16, 64),
    rows=(1, 8),
    side=64,
    copy=1 << 16,
    repeats=3,
)
SCALES = {scale.name: scale for scale in (FULL, TINY)}
