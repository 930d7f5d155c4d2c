"""Attention to one vector a token whose first features are its value (MLA): against the definition in fp64."""

import shutil
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import MergedHeads
from engine.attention.native import NativeAttention, why_not_native_attention
from engine.attention.reference import ReferenceAttention
from engine.attention.select import select_backend
from engine.attention.triton_latent import TritonLatentAttention
from engine.errors import ConfigError
from engine.inputs.step_buffers import to_device
from engine.kernels.base import TorchKernels
from engine.kv.cache import KVCache
from engine.kv.cache_specs import LatentSpec
from parallel import c_library
from tests.interpreter import exact_halves
from tests.long import examples, long
from tests.parity import test_attention as paged
from tests.parity.step_layouts import step_on

CPU = torch.device("cpu")
BLOCKS = 64
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, c_library.COMPILERS)), reason="no C compiler on this machine"
)
BACKENDS = {"reference": ReferenceAttention, "native": NativeAttention.create}


def spec(**values):
    known = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 48, "latent": 32, "block_size": 16}
    return paged.spec(**{**known, **values})


class Lab:
    """The cache of one layer, NaN where nothing was written, and steps of sequences on scattered blocks."""

    def __init__(self, backend):
        self.backend = backend
        s = backend.spec
        self.cache = KVCache([LatentSpec(s.dtype, s.head_dim, s.latent)], BLOCKS, s.block_size, CPU)
        self.cache.tensors[0].fill_(0 if backend.reads_unwritten else torch.nan)
        free = (np.random.default_rng(1).permutation(BLOCKS - 1) + 1).tolist()
        self.rows = [[free.pop() for _ in range(6)] for _ in range(8)]

    def run(self, sequences, counts, starts):
        """Attend to `counts` tokens of each sequence (its row and its queries | key) from `starts` on."""
        step = step_on([self.rows[row] for row, _ in sequences], counts, starts, self.backend.spec.block_size)
        ranges = zip(sequences, starts, counts, strict=True)
        heads = torch.cat([tokens[start : start + count] for (_, tokens), start, count in ranges])
        merged = MergedHeads(heads, None, None, 0.0, TorchKernels().norm_rotate)
        metadata = self.backend.prepare(to_device(step, CPU)[0])
        return self.backend.forward_merged(merged, self.cache.layers[0], metadata, 0).split(counts)


def definition(s, heads):
    """Causal attention of a whole sequence in fp64."""
    query, key = heads.double().split((s.num_heads, 1), dim=1)
    scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) * s.scale
    hidden = torch.ones(len(heads), len(heads), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), key[:, 0, : s.latent])


def tokens(s, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, s.num_heads + 1, s.head_dim, generator=generator).to(s.dtype)


@needs_compiler
@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(sorted(BACKENDS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sizes=st.sampled_from([(48, 32, 16), (80, 64, 32)]),
    heads=st.sampled_from([1, 4, 6, 17]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    cuts=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_attention_is_the_definition_in_any_chunks(name, dtype, sizes, heads, lengths, cuts):
    s = spec(dtype=dtype, head_dim=sizes[0], latent=sizes[1], block_size=sizes[2], num_heads=heads)
    check(BACKENDS[name](s), lengths, cuts)


def check(backend, lengths, cuts):
    """Attend to sequences of so many tokens in two steps, and compare with the definition."""
    s, lab = backend.spec, Lab(backend)
    sequences = [(row, tokens(s, length, row)) for row, length in enumerate(lengths)]
    first = [max(1, round(length * cut)) for length, cut in zip(lengths, cuts, strict=False)]
    begun = lab.run(sequences, first, [0] * len(first))
    rest = [length - done for length, done in zip(lengths, first, strict=True)]
    going = [i for i, left in enumerate(rest) if left]
    ends = {}
    if going:
        ended = lab.run([sequences[i] for i in going], [rest[i] for i in going], [first[i] for i in going])
        ends = dict(zip(going, ended, strict=True))
    tolerance = 1e-5 if s.dtype is torch.float32 else 3e-2
    for i, (_, heads) in enumerate(sequences):
        found = torch.cat((begun[i], ends[i])) if i in ends else begun[i]
        torch.testing.assert_close(found.double(), definition(s, heads), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "sizes", "processors"),
    [(4, (48, 32), 1), (6, (80, 64), 1000), long(17, (56, 40), 1), long(32, (576, 512), 1000)],
)
def test_triton_attends_to_latent_vectors_in_prompts_chunks_and_decodes(dtype, heads, sizes, processors):
    """A prompt, chunks behind one, tokens alone (of 90 in splits of keys where there are many processors)."""
    s = spec(dtype=dtype, num_heads=heads, head_dim=sizes[0], latent=sizes[1])
    backend = TritonLatentAttention(s)
    backend._processors = processors
    with exact_halves(), mock.patch("engine.attention.triton.LEAST_SPLIT", 32):
        check(backend, [33, 20, 90, 1], [1.0, 0.4, 89 / 90, 0.0])
        check(backend, [90, 2], [89 / 90, 0.5])


def test_padding_of_a_graph_gets_zeros_from_a_latent_cache():
    lab = Lab(TritonLatentAttention(spec()))
    lab.run([(0, tokens(spec(), 40, 0))], [40], [0])
    step, _ = to_device(paged.make_step([40, 0], [1, 1]), CPU)
    step = replace(step, seq_lens=torch.tensor([41, 0], dtype=torch.int32), slot_mapping=torch.tensor([0, 0]))
    step.block_tables[0, :3] = torch.tensor(lab.rows[0][:3])
    step = replace(step, block_tables=step.block_tables)
    metadata = lab.backend.decode_metadata(step, 96)
    merged = MergedHeads(tokens(spec(), 2, 3), None, None, 0.0, TorchKernels().norm_rotate)
    out = lab.backend.forward_merged(merged, lab.cache.layers[0], metadata, 0)
    assert out[1].eq(0).all()
    assert out[0].ne(0).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_do_not_depend_on_company_or_chunks(dtype):
    s = spec(dtype=dtype, num_heads=6)
    lab = Lab(NativeAttention.create(s))
    mine, others = (0, tokens(s, 70, 0)), [(row, tokens(s, 80, row)) for row in range(1, 5)]
    (alone,) = lab.run([mine], [70], [0])
    for size in (1, 7, 33):
        for start in range(0, 70, size):
            count = min(size, 70 - start)
            company = lab.run([others[0], mine, *others[1:]], [80, count, 1, 30, 5], [0, start, 0, 0, 0])
            assert torch.equal(company[1], alone[start : start + count])


@needs_compiler
def test_a_nan_of_a_later_token_reaches_no_earlier_one():
    s = spec()
    lab = Lab(NativeAttention.create(s))
    heads = tokens(s, 20, 0)
    expected = definition(s, heads)
    heads[15, s.num_heads] = torch.nan
    (found,) = lab.run([(0, heads)], [20], [0])
    torch.testing.assert_close(found[:15].double(), expected[:15], rtol=1e-5, atol=1e-5)
    assert found[15:].isnan().all()


def test_values_take_no_memory_of_their_own():
    cache = KVCache([LatentSpec(torch.bfloat16, 48, 32)] * 3, 10, 16, CPU)
    assert sum(tensor.nbytes for tensor in cache.tensors) == 3 * 10 * 16 * 48 * 2 + cache.token_ids.nbytes
    layer = cache.layers[1]
    assert layer.values.shape == (10, 16, 1, 32)
    assert layer.values.data_ptr() == layer.keys.data_ptr()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"latent": 24}, "values of 24 features"),
        ({"head_dim": 40}, "head size 40"),
        ({"block_size": 4}, "block_size 4"),
    ],
)
def test_sizes_that_the_compiled_kernels_do_not_take_go_to_the_reference(values, reason):
    assert why_not_native_attention(spec(**values)).startswith(reason)
    assert select_backend("auto", spec(**values)).name == "reference"


@pytest.mark.parametrize("name", ["flash", "torch_varlen"])
def test_backends_without_latent_caches_say_so(name):
    with pytest.raises(ConfigError, match="it reads no latent cache, which this model keeps"):
        select_backend(name, spec())
