"""The Triton attention kernels on a GPU, at the sizes of real models, against the definition of attention in fp64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention.base import PagedAttention
from engine.kernels.base import TorchKernels
from tests.engine.paged_lab import Lab, spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
QWEN3_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "scale": 128**-0.5}
MIXED = [(0, 700), (1500, 1), (300, 333), (0, 1), (4000, 1), (17, 1), (64, 64)]
DECODES = [(n, 1) for n in (1023, 0, 15, 16, 4095, 777, 64, 2)]


@pytest.fixture(scope="module")
def backend_of():
    from engine.attention.triton import TritonAttention

    return TritonAttention


def on_gpu(**values):
    return spec(**{**QWEN3_8B, "device": torch.device("cuda:0"), **values})


def run(backend, lab, window=0, metadata=None):
    """Return the result, and what it should be; what was stored is checked to the bit."""
    query, key, value = lab.split()
    metadata = metadata or backend.prepare(lab.step)
    out = backend.forward(query, key, value, lab.cache, metadata, window, lab.sinks())
    real = sum(new for _, new in lab.shapes)
    written = lab.stored().flatten(1, 2)[:, lab.step.slot_mapping[:real].long()]
    assert torch.equal(written, lab.as_stored(key, value)[:, :real])
    return out, lab.defined(query, window)


def check(backend, lab, window=0, metadata=None):
    out, expected = run(backend, lab, window, metadata)
    near = CLOSE[lab.spec.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("shapes", [MIXED, DECODES, [(0, 1)], [(32_000, 1)]], ids=["mixed", "decodes", "one", "long"])
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_steps(backend_of, shapes, page, dtype):
    s = on_gpu(block_size=page, dtype=dtype)
    check(backend_of(s), Lab(s, shapes))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(16, 8, 128), (32, 8, 64), (14, 2, 64), (8, 8, 128), (71, 1, 64), (8, 4, 256), (32, 32, 80), (64, 8, 128)],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_heads_of_real_models(backend_of, heads, kv_heads, head_dim, fp8):
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    s = on_gpu(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, fp8_cache=fp8)
    check(backend_of(s), Lab(s, MIXED))


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("shapes", [MIXED, DECODES, [(32_000, 1)]], ids=["mixed", "decodes", "long"])
def test_sinks(backend_of, window, shapes):
    """As gpt-oss has them."""
    s = on_gpu(num_heads=64, head_dim=64, windows=(0, 128), sinks=True)
    check(backend_of(s), Lab(s, shapes), window)


@pytest.mark.parametrize("shapes", [MIXED, DECODES, [(32_000, 1)]], ids=["mixed", "decodes", "long"])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_latent_vectors(shapes, heads):
    """As DeepSeek has them: the definition is that of one KV head whose value is the key's first 512 features."""
    from engine.attention.triton_latent import TritonLatentAttention

    s = on_gpu(num_heads=heads, num_kv_heads=1, head_dim=576, latent=512, scale=192**-0.5)
    lab, backend = Lab(s, shapes), TritonLatentAttention(s)
    query, key, _ = lab.split()
    out = backend.forward(query, key, key[..., :512], lab.cache, backend.prepare(lab.step), 0)
    lab.cache.values[:] = lab.cache.keys
    near = CLOSE[s.dtype]
    torch.testing.assert_close(out.double(), lab.defined(query, 0)[..., :512], rtol=near, atol=near)


@pytest.mark.parametrize("window", [1, 100, 1024])
@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("shapes", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_windows_and_softcaps(backend_of, window, softcap, shapes):
    s = on_gpu(windows=(0, window), softcap=softcap)
    check(backend_of(s), Lab(s, shapes), window)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shapes", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_norms_rotation_and_store_in_one_kernel(backend_of, dtype, normed, shapes):
    s = on_gpu(dtype=dtype)
    lab, other = Lab(s, shapes), Lab(s, shapes)
    fused = lab.heads(normed, True)
    backend, kernels = backend_of(s), TorchKernels()
    found = backend.forward_merged(fused, lab.cache, backend.prepare(lab.step), 0)
    plain = replace(fused, rotation=kernels.rotation(fused.rotation))
    expected = PagedAttention.forward_merged(backend, plain, other.cache, backend.prepare(other.step), 0)
    near = 3 * CLOSE[dtype]  # torch rounds in between, the kernel does not
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    torch.testing.assert_close(lab.cache.keys, other.cache.keys, rtol=near, atol=near, equal_nan=True)


def test_what_is_no_number_is_told_and_stays_in_its_row(backend_of):
    """In a split that is left out it would be lost."""
    s = on_gpu()
    lab = Lab(s, DECODES)
    lab.cache.keys[lab.tables[4, 0], 5, 0] = torch.nan
    backend = backend_of(s)
    out = backend.forward(*lab.split(), lab.cache, backend.prepare(lab.step), 0)
    assert out[4, : s.group].isnan().all()
    assert torch.isfinite(out[4, s.group :]).all()
    assert torch.isfinite(out[[0, 1, 2, 3, 5, 6, 7]]).all()


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_recorded_decode_step_serves_what_comes_later(backend_of, rows):
    """Recorded with rows of padding alone, replayed with lengths, tables and slots that were filled in afterwards."""
    s = on_gpu()
    lab = Lab(s, [(100 * n + 3, 1) for n in range(rows)], padding=3)
    backend = backend_of(s)
    known = {name: getattr(lab.step, name).clone() for name in ("seq_lens", "block_tables", "slot_mapping")}
    for name in known:
        getattr(lab.step, name).zero_()
    query, key, value = lab.split()

    def step():
        return backend.forward(query, key, value, lab.cache, backend.decode_metadata(lab.step, 40_000), 0)

    assert step().eq(0).all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for name, values in known.items():
        getattr(lab.step, name).copy_(values)
    graph.replay()
    torch.testing.assert_close(out.double(), lab.defined(query, 0), rtol=2e-2, atol=2e-2)
    assert out[rows:].eq(0).all()


@pytest.mark.parametrize("cut", [57, 1000, 1999, 2099])
def test_batch_invariant_tokens_have_the_same_bits_in_a_prompt_in_chunks_and_decoded(backend_of, cut):
    s = on_gpu(batch_invariant=True)
    whole, rest = Lab(s, [(0, 2100)]), Lab(s, [(cut, 2100 - cut)])
    rest.merged.copy_(whole.merged[cut:])
    backend = backend_of(s)
    expected = backend.forward(*whole.split(), whole.cache, backend.prepare(whole.step), 0)
    for store, own in ((rest.cache.keys, whole.cache.keys), (rest.cache.values, whole.cache.values)):
        where, source = (torch.from_numpy(lab.slots(0, np.arange(cut))) for lab in (rest, whole))
        store.flatten(0, 1)[where] = own.flatten(0, 1)[source]
    out = backend.forward(*rest.split(), rest.cache, backend.prepare(rest.step), 0)
    assert torch.equal(out, expected[cut:])


def test_batch_invariant_rows_have_the_same_bits_in_any_company(backend_of):
    s = on_gpu(batch_invariant=True)
    alone = Lab(s, [(3000, 1)])
    crowd = Lab(s, [(9000, 1), (3000, 1), *[(300, 1)] * 40, (0, 90)], seed=3)
    crowd.merged[1] = alone.merged[0]
    for store, own in ((crowd.cache.keys, alone.cache.keys), (crowd.cache.values, alone.cache.values)):
        where, source = (torch.from_numpy(lab.slots(row, np.arange(3001))) for lab, row in ((crowd, 1), (alone, 0)))
        store.flatten(0, 1)[where] = own.flatten(0, 1)[source]
    backend = backend_of(s)
    rows = [backend.forward(*lab.split(), lab.cache, backend.prepare(lab.step), 0) for lab in (alone, crowd)]
    assert torch.equal(rows[0][0], rows[1][1])
