"""The Triton attention kernels against the definition of attention, in Triton's interpreter."""

import inspect
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen

from engine.attention.base import PagedAttention
from engine.attention.triton import TritonAttention
from engine.attention.triton_fit import OVERLAPPING
from engine.attention.whole_prompts import TorchPrompts
from engine.kernels.base import TorchKernels
from tests.engine.paged_lab import Lab, spec
from tests.interpreter import exact_halves
from tests.long import examples, long
from tests.triton_compiler import compiled

HALVES = [torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.005}


@pytest.fixture(autouse=True)
def exact():
    with exact_halves():
        yield


def check(lab, backend=None, window=0, metadata=None):
    """Run the step, and compare what it stored and what it gave with what it should."""
    backend = backend or TritonAttention(lab.spec)
    query, key, value = lab.split()
    metadata = metadata or backend.prepare(lab.step)
    out = backend.forward(query, key, value, lab.cache, metadata, window, lab.sinks())
    real = sum(new for _, new in lab.shapes)
    written = lab.stored().flatten(1, 2)[:, lab.step.slot_mapping[:real]]
    assert torch.equal(written, lab.as_stored(key, value)[:, :real])
    expected = lab.defined(query, window)
    assert torch.isfinite(out).all()
    allowed = CLOSE[lab.spec.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=allowed, atol=allowed)
    return out


RAGGED = [(0, 5), (40, 1), (7, 9), (0, 1), (30, 20), (0, 33)]
DECODES = [(40, 1), (0, 1), (15, 1), (16, 1), (3, 1)]


@pytest.mark.parametrize("shapes", [RAGGED, DECODES, [(0, 1)], [(0, 64)]], ids=["mixed", "decode", "one", "whole"])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (2, 2)], ids=["gqa", "mqa", "mha"])
def test_ragged_steps(shapes, heads):
    check(Lab(spec(num_heads=heads[0], num_kv_heads=heads[1]), shapes))


@pytest.mark.parametrize("size", [16, 32, 256])
def test_pages_of_any_power_of_two(size):
    # The last one's first query sees all but the last key of a tile, and others of its own that one, too.
    check(Lab(spec(block_size=size), [(40, 1), (250, 12), (0, 7), (62, 9)]))


@pytest.mark.parametrize("window", [1, 5, 16, 33])
@pytest.mark.parametrize("softcap", [long(0.0), 3.0])
def test_windows_and_softcaps(window, softcap):
    # The last two begin to see at the last key of a tile.
    shapes = [(70, 1), (0, 40), (50, 9), (3, 1), (62 + window, 1), (62 + window, 9)]
    lab = Lab(spec(windows=(0, window), softcap=softcap), shapes)
    check(lab, window=window)


def test_layers_may_have_different_windows():
    lab = Lab(spec(windows=(0, 5)), RAGGED)
    backend = TritonAttention(lab.spec)
    metadata = backend.prepare(lab.step)
    for window in (0, 5):
        check(lab, backend, window, metadata)


@pytest.mark.parametrize("head_dim", [8, 24, 80])
@pytest.mark.parametrize("heads", [(6, 2), (14, 2), (20, 1)])
def test_heads_and_groups_that_are_no_powers_of_two(head_dim, heads):
    check(Lab(spec(head_dim=head_dim, num_heads=heads[0], num_kv_heads=heads[1]), [(20, 1), (3, 14), (33, 1)]))


@pytest.mark.parametrize("dtype", HALVES)
def test_halves(dtype):
    check(Lab(spec(dtype=dtype), RAGGED))


def split(lab, processors=1000):
    """Return a backend that splits the keys of decodes as for a GPU of so many processors."""
    backend = TritonAttention(lab.spec)
    backend._processors = processors
    return backend


def shared_out(launch):
    """Return which keys' splits the programs of a KV head take: (row, which, of how many) of each."""
    return [tuple(share) for share in launch.tiles.tolist() if share[2]]


@pytest.mark.parametrize("window", [long(0), 300])
def test_keys_of_long_decodes_are_split_and_joined(window):
    lab = Lab(spec(windows=(window,), softcap=2.0), [(700, 1), (0, 1), (127, 1), (300, 1)])
    backend = split(lab)
    assert backend.prepare(lab.step).launches[0].splits is not None
    check(lab, backend, window)


@pytest.mark.parametrize(
    ("poison", "processors"), [(torch.nan, 1000), (torch.inf, 1), long(torch.nan, 1), long(torch.inf, 1000)]
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_is_told_and_stays_in_its_row(processors, poison):
    """Left out with its split it would give tokens that nobody could tell from good ones."""
    lab = Lab(spec(), [(300, 1), (300, 1), (0, 20)])
    lab.cache.keys[lab.tables[0, 0], 5, 0] = poison
    lab.merged[:2, :4] = lab.merged[:2, :4].abs()
    backend = split(lab, processors)
    out = backend.forward(*lab.split(), lab.cache, backend.prepare(lab.step), 0)
    assert out[0, :2].isnan().all()  # of the two heads that see it
    assert torch.isfinite(out[0, 2:]).all()
    assert torch.isfinite(out[1:]).all()


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("longest", [90, 700])
@pytest.mark.parametrize("dtype", [torch.float32, long(torch.bfloat16)])
def test_a_sink_takes_its_share_of_each_heads_softmax_once(window, longest, dtype):
    lab = Lab(spec(windows=(0, window), sinks=True, dtype=dtype), [(longest, 1), (0, 1), (77, 1), (20, 9), (0, 40)])
    backend = split(lab)
    assert any(each.splits is not None for each in backend.prepare(lab.step).launches) == (longest > 128)
    check(lab, backend, window)
    fused = lab.heads(True, True)
    out = backend.forward_merged(fused, lab.cache, backend.prepare(lab.step), window)
    plain = replace(fused, rotation=TorchKernels().rotation(fused.rotation))
    expected = PagedAttention.forward_merged(backend, plain, lab.cache, backend.prepare(lab.step), window)
    torch.testing.assert_close(out, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_sink_far_above_all_scores_leaves_nothing_of_them():
    lab = Lab(spec(sinks=True), [(300, 1), (0, 5)], padding=1)
    sinks = torch.full((4,), 1e4)
    for processors in (1, 1000):
        backend = split(lab, processors)
        out = backend.forward(*lab.split(), lab.cache, backend.prepare(lab.step), 0, sinks)
        assert out.eq(0).all()


def launch_of(contexts, processors, **values):
    """Return how a step that decodes after so many tokens is launched."""
    lab = Lab(spec(**values), [(context, 1) for context in contexts])
    return split(lab, processors).prepare(lab.step).launches[0]


def test_splits_follow_lengths_batch_and_gpu():
    of_one = [(0, split, 7) for split in range(7)]
    assert launch_of([99], 16).splits is None  # too short
    assert shared_out(launch_of([800], 16)) == of_one  # of 128 keys at least
    assert shared_out(launch_of([800], 16, windows=(300,))) == [(0, 0, 3), (0, 1, 3), (0, 2, 3)]  # what it reads
    assert launch_of([2000] * 32, 8).splits is None  # enough to do without


def test_one_long_row_among_short_ones_is_shared_by_all_programs():
    """Nobody waits for it: no program has more keys than twice its share of all, or than a split has at least."""
    contexts = [40] * 30 + [4000] + [90] * 33
    launch, per_head = launch_of(contexts, 16), 4 * 16 // 2
    shares = shared_out(launch)
    longest = max(-(-(contexts[row] + 1) // splits) for row, _, splits in shares)
    assert longest <= max(128, 2 * sum(contexts) / per_head)
    assert sum(row == 30 for row, _, _ in shares) > 10
    assert sorted({row for row, _, _ in shares}) == list(range(64))
    assert len(shares) <= 64 + per_head


def test_decodes_of_a_mixed_step_are_split_too():
    lab = Lab(spec(), [(300, 1), (10, 20), (260, 1)])
    backend = split(lab)
    prompts, decodes = backend.prepare(lab.step).launches
    assert shared_out(decodes) == [(0, 0, 3), (0, 1, 3), (0, 2, 3), (2, 0, 3), (2, 1, 3), (2, 2, 3)]
    assert set(prompts.tiles[:, 0].tolist()) == {1}
    check(lab, backend)


def test_prompts_are_cut_into_tiles():
    lab = Lab(spec(num_heads=16, num_kv_heads=1), [(9, 30), (0, 17)])
    backend = TritonAttention(lab.spec)
    tiles = backend.prepare(lab.step).launches[0].tiles
    per_tile = backend._tuning.prefill.rows // 16
    assert len(tiles) == -(-30 // per_tile) + -(-17 // per_tile)
    check(lab, backend)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("processors", [1, 32])
def test_rows_of_padding_get_zeros(processors, sinks):
    lab = Lab(spec(sinks=sinks), [(200, 1), (4, 1)], padding=3)
    backend = split(lab, processors)
    query, key, value = lab.split()
    for metadata in (backend.decode_metadata(lab.step, 2000), backend.prepare(lab.step)):
        out = backend.forward(query, key, value, lab.cache, metadata, 0, lab.sinks())
        torch.testing.assert_close(out.double(), lab.defined(query, 0), rtol=2e-5, atol=2e-5)
        assert out[2:].eq(0).all()


def test_a_graph_recorded_for_no_lengths_serves_any():
    """A graph is recorded before any request is known: lengths, tables and slots come later, in place."""
    lab = Lab(spec(windows=(0, 40)), [(600, 1), (77, 1), (0, 1)], padding=1)
    backend = split(lab, processors=64)
    known = {name: getattr(lab.step, name).clone() for name in ("seq_lens", "block_tables", "slot_mapping")}
    for name in known:
        getattr(lab.step, name).zero_()
    blank = backend.decode_metadata(lab.step, 4096)
    query, key, value = lab.split()
    assert backend.forward(query, key, value, lab.cache, blank, 0).eq(0).all()
    for name, values in known.items():
        getattr(lab.step, name).copy_(values)
    metadata = backend.decode_metadata(lab.step, 4096)  # as a graph does, which holds this as well
    assert metadata.launches[0].tiles.shape == blank.launches[0].tiles.shape
    assert len(shared_out(blank.launches[0])) == 4 < len(shared_out(metadata.launches[0]))
    for window in (0, 40):
        out = backend.forward(query, key, value, lab.cache, metadata, window)
        torch.testing.assert_close(out.double(), lab.defined(query, window), rtol=2e-5, atol=2e-5)


def test_a_graph_has_room_for_some_prompts_and_any_decodes():
    backend = TritonAttention(spec())
    fits, many = ([(30, 1)] * 20 + [(0, 2)] * count for count in (16, 30))
    assert backend.mixed_plan(Lab(spec(), fits).step.layout, 64, 40).size == backend.mixed_plan_size(64, 40)
    assert backend.mixed_plan(Lab(spec(), many).step.layout, 64, 60) is None


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("head_dim", [long(16), 24])
def test_norms_rotation_and_store_in_one_kernel(normed, rotated, head_dim):
    lab = Lab(spec(head_dim=head_dim, num_heads=6, num_kv_heads=2), RAGGED)
    fused = lab.heads(normed, rotated)
    kernels = TorchKernels()
    plain = replace(fused, rotation=kernels.rotation(fused.rotation) if rotated else None)
    backend, other = TritonAttention(lab.spec), Lab(lab.spec, RAGGED)
    out = backend.forward_merged(fused, lab.cache, backend.prepare(lab.step), 0)
    expected = PagedAttention.forward_merged(backend, plain, other.cache, backend.prepare(other.step), 0)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lab.cache.keys, other.cache.keys, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert torch.equal(lab.cache.values.nan_to_num(9), other.cache.values.nan_to_num(9))


def test_the_fused_kernel_rounds_once():
    """In bfloat16 it is nearer to the exact result than norm, product and rotation each rounded."""
    lab = Lab(spec(dtype=torch.bfloat16, head_dim=64), [(0, 30)])
    merged = lab.heads(True, True)
    exact = replace(lab.heads(False, False), heads=merged.heads.double())
    angles = TorchKernels().rotation(merged.rotation.double())
    whole = TorchKernels().norm_rotate(exact.heads[:, :6], merged.norms.double(), angles, 1e-5)
    backend = TritonAttention(lab.spec)
    backend.forward_merged(merged, lab.cache, backend.prepare(lab.step), 0)
    stored = lab.cache.keys.flatten(0, 1)[lab.step.slot_mapping]
    assert torch.equal(stored, whole[:, 4:].float().bfloat16())


@pytest.mark.parametrize("dtype", [long(torch.float32), torch.bfloat16])
def test_fp8_cache_with_a_scale_per_head(dtype):
    lab = Lab(spec(fp8_cache=True, dtype=dtype), [(40, 1), (7, 9), (300, 1)])
    check(lab, split(lab))


def test_fused_store_into_an_fp8_cache():
    lab = Lab(spec(fp8_cache=True), RAGGED)
    other = Lab(lab.spec, RAGGED)
    backend, merged = TritonAttention(lab.spec), lab.heads(True, True)
    backend.forward_merged(merged, lab.cache, backend.prepare(lab.step), 0)
    plain = replace(merged, rotation=TorchKernels().rotation(merged.rotation))
    PagedAttention.forward_merged(backend, plain, other.cache, backend.prepare(other.step), 0)
    assert (lab.cache.keys.view(torch.uint8) != other.cache.keys.view(torch.uint8)).float().mean() < 0.01
    assert torch.equal(lab.cache.values.view(torch.uint8), other.cache.values.view(torch.uint8))


def test_what_fp8_cannot_hold_becomes_its_largest_number():
    lab = Lab(spec(fp8_cache=True), [(0, 3)])
    lab.cache.scales.fill_(1.0)
    lab.merged[:, 4:].fill_(1e4)
    lab.merged[1, 4:] = -1e4
    lab.merged[2, 4:] = torch.nan
    backend = TritonAttention(lab.spec)
    backend.forward(*lab.split(), lab.cache, backend.prepare(lab.step), 0)
    stored = lab.stored().flatten(1, 2)[:, lab.step.slot_mapping]
    assert stored[:, 0].eq(448).all()
    assert stored[:, 1].eq(-448).all()
    assert stored[:, 2].isnan().all()


def test_batch_invariant_rows_have_the_same_bits_in_any_company():
    s = spec(batch_invariant=True, windows=(0, 30))
    alone = Lab(s, [(700, 1)])
    crowd = Lab(s, [(1500, 1), (700, 1), *[(3, 1)] * 9, (0, 9)], seed=3)
    crowd.merged[1] = alone.merged[0]
    for store, own in ((crowd.cache.keys, alone.cache.keys), (crowd.cache.values, alone.cache.values)):
        where, source = (torch.from_numpy(lab.slots(row, np.arange(701))) for lab, row in ((crowd, 1), (alone, 0)))
        store.flatten(0, 1)[where] = own.flatten(0, 1)[source]
    for window in (0, 30):
        results = []
        for lab, processors in ((alone, 1), (crowd, 1000)):
            backend = split(lab, processors)
            results.append(backend.forward(*lab.split(), lab.cache, backend.prepare(lab.step), window))
        assert torch.equal(results[0][0], results[1][1])


@pytest.mark.parametrize(("cut", "window"), [(257, 30), (299, 0), long(257, 0), long(299, 30)])
def test_batch_invariant_tokens_have_the_same_bits_in_a_prompt_in_chunks_and_decoded(window, cut):
    s = spec(batch_invariant=True, windows=(window,))
    whole, rest = Lab(s, [(0, 300)]), Lab(s, [(cut, 300 - cut)])
    rest.merged.copy_(whole.merged[cut:])
    backend = split(whole)
    expected = backend.forward(*whole.split(), whole.cache, backend.prepare(whole.step), window)
    for store, own in ((rest.cache.keys, whole.cache.keys), (rest.cache.values, whole.cache.values)):
        where, source = (torch.from_numpy(lab.slots(0, np.arange(cut))) for lab in (rest, whole))
        store.flatten(0, 1)[where] = own.flatten(0, 1)[source]
    out = backend.forward(*rest.split(), rest.cache, backend.prepare(rest.step), window)
    assert torch.equal(out, expected[cut:])


class Varlen:
    """Stands in for `varlen_attn` and `varlen_attn_out` of torch, with their arguments: ragged, causal, no pages."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **settings):
        given = inspect.signature(varlen.varlen_attn).bind(*args, **settings).arguments
        starts, longest = given["cu_seq_q"].tolist(), given["max_q"]
        assert torch.equal(given["cu_seq_k"], given["cu_seq_q"])
        assert longest == given["max_k"] == max(np.diff(starts))
        assert given["cu_seq_q"].dtype is torch.int32
        left, right = given["window_size"]
        assert right == 0
        self.calls.append(np.diff(starts).tolist())
        query, key, value = (given[name].double() for name in ("query", "key", "value"))
        group = query.shape[1] // key.shape[1]
        assert given.get("enable_gqa", False) == (group > 1)
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
        results = []
        for first, beyond in itertools.pairwise(starts):
            scores = torch.einsum("qhd,khd->hqk", query[first:beyond], key[first:beyond]) * given["scale"]
            at = torch.arange(beyond - first)
            seen = (at <= at[:, None]) & ((at >= at[:, None] - left) | (left < 0))
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            results.append(torch.einsum("hqk,khd->qhd", weights, value[first:beyond]))
        return torch.cat(results).to(given["query"].dtype)

    def into(self, out, *args, **settings):
        out.copy_(self(*args, **settings))


def beside_torch(lab, into=True):
    """Return a backend whose whole prompts are torch's, and what stands in for that."""
    torchs, stand_in = TorchPrompts(lab.spec), Varlen()
    torchs._attention, torchs._into = stand_in, stand_in.into if into else None
    return TritonAttention(lab.spec, torchs=torchs), stand_in


@pytest.mark.parametrize(
    ("shapes", "whole"),
    [
        ([(0, 5), (0, 33)], [5, 33]),
        ([(40, 1), (7, 9), (0, 1), (0, 20), (0, 12)], [20, 12]),  # as a scheduler sorts them: newcomers last
        ([(0, 9), (30, 20), (0, 33), (0, 2), (90, 1), (0, 8)], [33, 2]),  # most tokens side by side
        ([(0, 1), (7, 9)], None),
        ([(16, 30)], None),  # found in the prefix cache
    ],
)
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("heads", [(4, 2), long((2, 2))])
def test_whole_prompts_are_torchs(shapes, whole, window, heads):
    lab = Lab(spec(num_heads=heads[0], num_kv_heads=heads[1], windows=(0, window)), shapes)
    backend, theirs = beside_torch(lab, into=window > 0)
    check(lab, backend, window)
    assert theirs.calls == ([whole] if whole else [])
    ours = {row for launch in backend.prepare(lab.step).launches for row in launch.tiles[:, 0].tolist()}
    assert len(ours) == len(shapes) - len(whole or ())


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_prompts_are_torchs_with_the_keys_that_are_stored(normed, dtype):
    shapes = [(40, 1), (7, 9), (0, 20), (0, 12)]
    lab = Lab(spec(num_heads=6, num_kv_heads=2, dtype=dtype), shapes)
    other = Lab(lab.spec, shapes)
    fused = lab.heads(normed, True)
    backend, theirs = beside_torch(lab)
    out = backend.forward_merged(fused, lab.cache, backend.prepare(lab.step), 0)
    ours = TritonAttention(lab.spec)
    expected = ours.forward_merged(fused, other.cache, ours.prepare(other.step), 0)
    assert theirs.calls == [[20, 12]]
    torch.testing.assert_close(out, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert torch.equal(lab.cache.keys.nan_to_num(9), other.cache.keys.nan_to_num(9))
    assert torch.equal(lab.cache.values.nan_to_num(9), other.cache.values.nan_to_num(9))


sequences = st.lists(
    st.tuples(st.integers(0, 40), st.just(1)) | st.tuples(st.sampled_from([0, 5, 16, 17]), st.integers(1, 24)),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=examples(12))
@given(sequences, st.sampled_from([(2, 1), (3, 3), (6, 2)]), st.sampled_from([0, 7]), st.sampled_from([1, 1000]))
def test_any_step(shapes, heads, window, processors):
    lab = Lab(spec(num_heads=heads[0], num_kv_heads=heads[1], head_dim=8, windows=(window,)), shapes)
    check(lab, split(lab, processors), window)


@pytest.fixture(scope="module")
def launches():
    return compiled("tests.engine.attention.triton_attention_launches")


@pytest.mark.timeout(600)
def test_kernels_compile_for_gpus_and_fit_them(launches):
    """What the interpreter does not tell: types, layouts, registers, shared memory."""
    kernels = {"attend", "attend_latent", "share_out", "combine", "store", "norm_rotate_store"}
    assert {one["kernel"] for one in launches} == kernels
    for one in launches:
        assert one["kernel"] != "attend" or one["shared"] <= one["foretold"], one
        assert max(one["shared"], one["foretold"]) <= one["room"], one
        assert one["spilled"] <= 96, one
        # What is stored in fp8 is compared by its bits: an interpreter's quotients are exact anyway.
        assert not (one["kernel"] == "store" and one["inexact"]), one
    # Keys that all queries of a tile see have code of their own, but for batch_invariant: bits depend on the code.
    plain, invariant = (
        min(one["products"] for one in launches if (one["case"], one["kernel"]) == (case, "attend"))
        for case in ("bf16", "batch invariant")
    )
    assert plain == 2 * invariant > 0
    # One for prompts, two for decodes (split or not): whatever comes later, nothing is compiled while it is served.
    counts = Counter((one["case"], one["kernel"]) for one in launches)
    assert max(counts.values()) == 3
    # Keys that were rotated are kept beside the cache where whole prompts are torch's.
    assert all(count <= 2 for (_, kernel), count in counts.items() if kernel == "norm_rotate_store")
    several = ("attend", "attend_latent", "norm_rotate_store")
    assert all(count == 1 for (_, kernel), count in counts.items() if kernel not in several)


def test_keys_and_values_are_loaded_while_others_are_multiplied(launches):
    """A wait that leaves no load on its way is one for memory, once per tile of keys, whatever the stages."""
    attends = [one for one in launches if one["kernel"] == "attend"]
    for one in attends:
        in_loops = one["left"][::2]  # behind each loop what is left is waited for
        assert in_loops, one
        assert all(left > 0 for left in in_loops) == (one["stages"] >= OVERLAPPING), one
    # Fewer stages are for GPUs whose shared memory does not hold a wide head's tiles.
    assert {one["case"] for one in attends if one["stages"] < OVERLAPPING} == {"wide head elsewhere"}
