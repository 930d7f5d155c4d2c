import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv import cache_size as kv_room
from engine.kv.cache import KVCache, cuda_budget, opened_blocks
from engine.kv.cache_size import cpu_budget, fit_cache, fit_given_blocks, given_budget, gpu_budget
from engine.kv.cache_specs import (
    FullAttentionSpec,
    LatentSpec,
    RecurrentSpec,
    SlidingWindowSpec,
    block_bytes,
    state_bytes,
)

CPU = torch.device("cpu")


def config(**values):
    return EngineConfig("model", **{"max_model_len": 100, "block_size": 16, "device": "cpu", **values})


def full(count, kv_heads, head_dim, dtype=torch.float32):
    return [FullAttentionSpec(dtype, kv_heads, head_dim)] * count


UNLIKE = [
    FullAttentionSpec(torch.float32, 2, 8),
    SlidingWindowSpec(torch.float32, 2, 8, 5),  # of one shape with the first
    FullAttentionSpec(torch.float32, 4, 16),
    LatentSpec(torch.bfloat16, 24, 16),
    RecurrentSpec(torch.float32, ((3, 5), (7,))),
]


def test_layers_that_are_alike_share_one_tensor_with_a_view_each():
    cache = KVCache(full(3, 2, 8), 10, 4, CPU)
    assert [tuple(tensor.shape) for tensor in cache.tensors] == [(6, 10, 4, 2, 8), (1, 10, 4)]
    for layer in range(3):
        cache.layers[layer].keys.fill_(layer)
        cache.layers[layer].values.fill_(10 + layer)
    assert sorted(cache.tensors[0][:, 0, 0, 0, 0].tolist()) == [0, 1, 2, 10, 11, 12]
    for layer in range(3):
        assert cache.layers[layer].keys.eq(layer).all()
        assert cache.layers[layer].values.eq(10 + layer).all()


def test_the_null_block_starts_as_zeros():
    for tensor in KVCache(UNLIKE, 10, 4, CPU).tensors:
        assert tensor[:, 0].eq(0).all()


def test_layers_that_are_unlike_share_one_pool_of_blocks():
    cache = KVCache(UNLIKE, 10, 4, CPU)
    assert sum(tensor.nbytes for tensor in cache.tensors) == 10 * block_bytes(UNLIKE, 4)
    assert cache.layers[1].keys.shape == (10, 4, 2, 8)
    assert cache.layers[2].values.shape == (10, 4, 4, 16)
    assert (cache.layers[3].keys.shape, cache.layers[3].values.shape) == ((10, 4, 1, 24), (10, 4, 1, 16))
    assert cache.layers[3].keys.dtype is torch.bfloat16
    memory = [cache.layers[i].keys for i in range(3)] + [cache.layers[i].values for i in range(3)]
    memory.append(cache.layers[3].keys)
    assert len({part.data_ptr() for part in memory}) == len(memory)
    for part in memory:
        part[2] = 7
    cache.copy(torch.tensor([[2, 5]], dtype=torch.int32))
    cache.clear(torch.tensor([2]))
    for part in memory:
        assert part[5].eq(7).all()
        assert part[2].eq(0).all()


def test_states_have_slots_of_their_own():
    cache = KVCache(UNLIKE, 10, 4, CPU, num_states=6)
    parts = cache.layers[4]
    assert [tuple(part.shape) for part in parts] == [(6, 3, 5), (6, 7)]
    assert sum(tensor.nbytes for tensor in cache.states) == 6 * state_bytes(UNLIKE)
    for part in parts:
        part.copy_(torch.arange(6.0).view(6, *[1] * (part.dim() - 1)).expand(part.shape))
    cache.copy(torch.tensor([[2, 5]], dtype=torch.int32))
    cache.copy_states(torch.tensor([[1, 4], [2, 5]], dtype=torch.int32))
    for part in parts:
        assert part.flatten(1)[:, 0].tolist() == [0, 1, 2, 3, 1, 2]
    cache.drop()
    assert all(not tensor.untyped_storage().nbytes() for tensor in cache.states)
    cache.restore()
    assert sum(tensor.nbytes for tensor in cache.states) == 6 * state_bytes(UNLIKE)


def test_dropped_memory_is_taken_again():
    cache = KVCache(UNLIKE, 10, 4, CPU)
    cache.drop()
    assert all(not tensor.untyped_storage().nbytes() for tensor in cache.tensors)
    cache.restore()
    assert cache.layers[2].keys[0].eq(0).all()
    cache.layers[2].keys[9] = 1


def test_blocks_are_copied_and_cleared_in_all_layers():
    cache = KVCache(full(2, 1, 2), 6, 4, CPU)
    tensor, _ = cache.tensors
    cache.token_ids[1:3] = torch.arange(8, dtype=torch.int32).view(2, 4)
    tensor.copy_(torch.arange(6.0).view(1, 6, 1, 1, 1).expand(tensor.shape))
    cache.copy(torch.tensor([[1, 4], [2, 5]], dtype=torch.int32))
    cache.clear(torch.tensor([3]))
    assert tensor[:, :, 0, 0, 0].eq(torch.tensor([0.0, 1, 2, 0, 1, 2])).all()
    assert torch.equal(cache.token_ids[[4, 5]].flatten(), torch.arange(8, dtype=torch.int32))


def test_an_fp8_cache_is_copied_and_cleared_by_bytes():
    scales = torch.rand(2, 2, 1)
    cache = KVCache(full(2, 1, 2, torch.float8_e4m3fn), 4, 4, CPU, tuple(scales))
    layer = cache.layers[1]
    assert layer.keys.dtype is layer.values.dtype is torch.float8_e4m3fn
    assert torch.equal(layer.scales, scales[1])
    layer.keys[1] = torch.full((4, 1, 2), 1.5).to(torch.float8_e4m3fn)
    cache.copy(torch.tensor([[1, 3]]))
    cache.clear(torch.tensor([1]))
    assert layer.keys[3].float().eq(1.5).all()
    assert layer.keys[1].float().eq(0).all()


def test_opened_blocks_are_those_begun_but_not_filled():
    slots = [8, 9, 10, 11, 12, 13, 22, 23, 40]  # block 2 filled, 3 begun, 5 gone on with, 10 begun
    assert opened_blocks(np.array(slots, np.int32), 4).tolist() == [3, 10]


def test_a_block_has_a_part_for_each_layer():
    assert block_bytes(full(12, 4, 64, torch.bfloat16), 16) == 2 * 12 * 16 * 4 * 64 * 2 + 16 * 4
    assert block_bytes(UNLIKE, 4) == 4 * (2 * 2 * (4 * 2 * 8) + 2 * (4 * 4 * 16)) + 2 * (4 * 24) + 4 * 4
    assert state_bytes(UNLIKE) == 4 * (3 * 5 + 7)


def test_cpu_budget_is_the_setting_or_a_quarter_of_what_is_free(monkeypatch):
    assert cpu_budget(config(kv_cache_memory_bytes=12345)) == 12345
    monkeypatch.setattr(kv_room, "free_memory", lambda: 8 << 30)
    assert cpu_budget(config()) == 2 << 30
    assert cpu_budget(config(tensor_parallel_size=2)) == 1 << 30
    monkeypatch.setattr(kv_room, "free_memory", lambda: 1 << 40)
    assert cpu_budget(config()) == 4 << 30


def test_cuda_budget_leaves_room_for_the_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    # 40 in use, of which torch holds 30 now and held 45 at most during the warm-up
    assert cuda_budget(config(gpu_memory_utilization=0.9), torch.device("cuda"), peak=45, current=30) == 90 - 40 - 15


def test_bytes_that_are_set_are_the_cache_of_a_gpu_too_whatever_its_share():
    set_so = config(kv_cache_memory_bytes=1000, gpu_memory_utilization=0.01, device="cuda")
    assert gpu_budget(set_so, total=5000, free=4000, peak=900, current=800) == 5000 - 1000 - 100
    assert given_budget(set_so, 3900) == 1000
    assert given_budget(config(device="cuda"), 3900) == 3900
    assert given_budget(config(kv_cache_memory_bytes=1000, device="cpu"), 12) == 1000


def test_more_bytes_than_the_gpu_has_left_are_refused_with_what_works():
    for room, works in ((600, "600 bytes .* lower it to 600"), (-5, "0 bytes .* use a larger GPU")):
        with pytest.raises(ConfigError, match=works) as error:
            given_budget(config(kv_cache_memory_bytes=1000, device="cuda"), room)
        assert error.value.flag == "kv_cache_memory_bytes"


def test_too_few_bytes_that_are_set_for_a_gpu_name_their_own_flag():
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes to 800"):
        fit_cache(config(device="cuda", kv_cache_memory_bytes=600), 6, 100, shrink=False)


def test_cpu_takes_no_more_blocks_than_sequences_can_fill():
    assert fit_cache(config(max_num_seqs=2), 1000, 1, shrink=False).num_kv_blocks == 2 * 7 + 1
    assert fit_cache(config(max_num_seqs=2, device="cuda"), 1000, 1, shrink=False).num_kv_blocks == 1000


def test_too_little_memory_names_the_flags_that_help():
    with pytest.raises(
        ConfigError, match=r"lower max_model_len to 80 or raise kv_cache_memory_bytes to 800"
    ) as error:
        fit_cache(config(), 6, 100, shrink=False)
    assert error.value.flag == "max_model_len"
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization") as error:
        fit_cache(config(device="cuda"), -3, 100, shrink=True)
    assert error.value.flag == "gpu_memory_utilization"


def test_a_context_that_nobody_asked_for_is_lowered_to_what_fits(caplog):
    fitted = fit_cache(config(max_model_len=100_000), 101, 1, shrink=True)
    assert fitted.max_model_len == 1600
    assert "max_model_len" in caplog.text
    with pytest.raises(ConfigError):
        fit_cache(config(max_model_len=100_000), 11, 1, shrink=True)


def test_too_few_blocks_for_one_sequence_are_refused_with_numbers_that_work():
    with pytest.raises(
        ConfigError,
        match=r"num_kv_blocks=3 holds 32 tokens.*max_model_len=100; raise num_kv_blocks to 8 or lower max_model_len",
    ) as error:
        fit_given_blocks(config(num_kv_blocks=3), shrink=False)
    assert error.value.flag == "num_kv_blocks"
    for works in (config(num_kv_blocks=8), config(num_kv_blocks=3, max_model_len=32), config()):
        assert fit_given_blocks(works, shrink=False) == works


def test_given_blocks_lower_only_a_context_that_nobody_asked_for():
    many = config(max_model_len=100_000, num_kv_blocks=101)
    assert fit_given_blocks(many, shrink=True) == config(max_model_len=1600, num_kv_blocks=101)
    with pytest.raises(ConfigError, match="raise num_kv_blocks to 6251 or lower max_model_len to 1600"):
        fit_given_blocks(many, shrink=False)
    with pytest.raises(ConfigError, match="lower max_model_len to 160"):
        fit_given_blocks(config(max_model_len=100_000, num_kv_blocks=11), shrink=True)
