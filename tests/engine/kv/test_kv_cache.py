import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv import room as kv_room
from engine.kv.cache import KVCache, block_bytes, cuda_budget, opened_blocks
from engine.kv.room import cpu_budget, fit_cache, fit_given_blocks

CPU = torch.device("cpu")


def config(**values):
    return EngineConfig("model", **{"max_model_len": 100, "block_size": 16, "device": "cpu", **values})


def test_one_tensor_with_a_view_per_layer():
    cache = KVCache(3, 10, 4, 2, 8, torch.float32, CPU)
    assert cache.tensor.shape == (2, 3, 10, 4, 2, 8)
    cache.layers[1].keys.fill_(1)
    cache.layers[1].values.fill_(2)
    assert cache.tensor[0, 1].eq(1).all()
    assert cache.tensor[1, 1].eq(2).all()


def test_null_block_starts_as_zeros():
    assert KVCache(3, 10, 4, 2, 8, torch.float32, CPU).tensor[:, :, 0].eq(0).all()


def test_blocks_are_copied_and_cleared_in_all_layers():
    cache = KVCache(2, 6, 4, 1, 2, torch.float32, CPU)
    cache.tensor.copy_(torch.arange(6.0).view(1, 1, 6, 1, 1, 1).expand(cache.tensor.shape))
    cache.copy(torch.tensor([[1, 4], [2, 5]], dtype=torch.int32))
    cache.clear(torch.tensor([3]))
    assert cache.tensor[:, :, :, 0, 0, 0].eq(torch.tensor([0.0, 1, 2, 0, 1, 2])).all()


def test_an_fp8_cache_is_copied_and_cleared_by_bytes():
    scales = torch.rand(2, 2, 1)
    cache = KVCache(2, 4, 4, 1, 2, torch.float8_e4m3fn, CPU, scales)
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


def test_block_bytes():
    assert block_bytes(12, 16, 4, 64, torch.bfloat16) == 2 * 12 * 16 * 4 * 64 * 2


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
