"""What `squadron plan` counts with against what the engine then allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deploy.demo import demo_model_path
from engine.attention.base import AttentionContext
from engine.config import EngineConfig
from engine.layers.attention import attention_specs
from engine.layers.norm import EachHeadNorm
from engine.loader.checkpoint import open_model
from engine.loader.weights import load_model
from engine.quantization.select import quantization_of
from engine.resolve import resolve
from engine.worker.footprint import META, LiveBytes, build_blueprint, footprint_of
from engine.worker.meta_kernels import BlueprintAttention
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.parity.tiny_models import CONFIGS, make

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = (*CONFIGS, "demo")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, folder in made.items():
        make(name, folder)
    return made | {"demo": demo_model_path()}


def settings(folder, size, dtype="float32"):
    return EngineConfig(
        str(folder), device="cpu", dtype=dtype, tensor_parallel_size=size, kv_cache_memory_bytes=12 << 20
    )


def held_weights(group, folder, config):
    """Bytes of weights, angles and laid-out norms of a loaded decoder."""
    made = quantization_of(config, folder.config.quantization)
    model = load_model(folder, config.context_len, group, getattr(torch, config.dtype), made)
    norms = [getattr(part, "head_norms", None) for part in model.attention]
    tables = [norm for norm in norms if norm is not None]
    tables += [part.table for part in model.of_positions]
    tables += [part.scales for part in model.modules() if isinstance(part, EachHeadNorm)]
    storages = {held.untyped_storage().data_ptr(): held.untyped_storage().nbytes() for held in model.parameters()}
    return sum(storages.values()) + sum(table.untyped_storage().nbytes() for table in tables)


def held_cache(group, config):
    runner = ModelRunner(config, group)
    return runner.config.num_kv_blocks, sum(each.untyped_storage().nbytes() for each in runner._cache.tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_weights_are_what_one_rank_loads(folders, name, dtype):
    folder, config = open_model(str(folders[name])), settings(folders[name], 1, dtype)
    full = resolve(config, folder.config)
    assert held_weights(SoloGroup(), folder, full) == footprint_of(full, folder.config).weight_bytes


@pytest.mark.parametrize("method", ["int4", "int8"])
def test_weights_made_small_are_what_one_rank_loads(folders, method):
    """As a GPU holds them: none of a CPU's kernels has packed them."""
    folder, config = open_model(str(folders["demo"])), settings(folders["demo"], 1, "bfloat16")
    full = resolve(replace(config, quantization=method), folder.config)
    assert held_weights(SoloGroup(), folder, full) == footprint_of(full, folder.config).weight_bytes


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_what_each_of_two_ranks_loads(folders, two_ranks, name):
    folder = open_model(str(folders[name]))
    full = resolve(settings(folders[name], 2), folder.config)
    held = two_ranks(held_weights, folder, full)
    assert held == [footprint_of(full, folder.config).weight_bytes] * 2


@pytest.mark.parametrize("name", KINDS)
def test_the_cache_is_what_one_rank_allocates(folders, name):
    config, model = settings(folders[name], 1), open_model(str(folders[name])).config
    found = footprint_of(resolve(config, model), model)
    blocks = config.kv_cache_memory_bytes // found.block_bytes
    assert held_cache(SoloGroup(), config) == (blocks, blocks * found.block_bytes)


@pytest.mark.parametrize("name", KINDS)
def test_the_cache_is_what_each_of_two_ranks_allocates(folders, two_ranks, name):
    config, model = settings(folders[name], 2), open_model(str(folders[name])).config
    found = footprint_of(resolve(config, model), model)
    blocks = config.kv_cache_memory_bytes // found.block_bytes
    assert two_ranks(held_cache, config) == [(blocks, blocks * found.block_bytes)] * 2


@pytest.mark.parametrize("name", ["demo", "gpt2", "qwen3"])
def test_the_layers_take_as_much_on_a_device_with_memory_as_on_one_without(folders, name):
    folder = open_model(str(folders[name]))
    config = resolve(settings(folders[name], 1), folder.config)
    blueprint = build_blueprint(config, folder.config)
    loaded = load_model(folder, config.context_len, SoloGroup(), torch.float32)
    attention = BlueprintAttention(attention_specs(blueprint.cached, config, META)[0][0])
    assert peak(blueprint, attention) == peak(loaded, attention) > 500 * folder.config.hidden_size * 4


def peak(model, attention):
    """Most bytes alive in the layers and the output head of 500 tokens."""
    ids = torch.zeros(500, dtype=torch.int32, device=model.embedding.weight.device)
    nothing = torch.empty(0)
    context = AttentionContext(attention, None, ((nothing, nothing),) * len(model.layers))
    with torch.inference_mode(), LiveBytes() as seen:
        model.logits(model(ids, ids, context))
    return seen.peak
