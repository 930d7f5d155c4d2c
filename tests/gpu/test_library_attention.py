"""Attention by libraries, where they are installed, against the reference on the same GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.attention.base import AttentionSpec, LayerCache
from engine.attention.reference import ReferenceAttention
from engine.attention.select import select_backend
from engine.errors import ConfigError
from engine.inputs.step_buffers import to_device
from tests.parity.step_layouts import NUM_BLOCKS, make_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
STEPS = [([0, 0, 0], [5, 1, 300]), ([0, 800, 20], [5, 3, 1]), ([4, 700, 20], [1, 1, 1])]


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize(("computed", "lengths"), STEPS)
@pytest.mark.parametrize("name", ["flash", "torch_varlen", "auto"])  # "auto" leaves whole prompts to torch
def test_a_library_gives_the_references_attention(name, computed, lengths, page, window):
    device, dtype = torch.device("cuda:0"), torch.bfloat16
    spec = AttentionSpec(16, 4, 128, 128**-0.5, (window,), 0.0, page, dtype, device)
    try:
        backend = select_backend(name, spec)
    except ConfigError as error:
        pytest.skip(str(error))
    step, _ = to_device(make_step(computed, lengths, block=page), device)
    shape = (NUM_BLOCKS, page, spec.num_kv_heads, spec.head_dim)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    heads = torch.randn(
        sum(lengths), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, device=device, dtype=dtype
    )
    parts = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    oracle = ReferenceAttention(replace(spec, dtype=torch.float32))
    wide = LayerCache(*(cache.float() for cache in caches))
    expected = oracle.forward(*(part.float() for part in parts), wide, oracle.prepare(step), window)
    found = backend.forward(*parts, LayerCache(*caches), backend.prepare(step), window)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
