"""A model whose layers differ in heads, windows and feed-forward: its tokens against plain torch, its sizes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from typing_extensions import override

from engine.attention.base import UnlikeLayers
from engine.config import EngineConfig
from engine.layers.attention import Attention, attention_specs
from engine.layers.base import Build
from engine.layers.mlp import MLP, GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rope import RopeSpec, Rotary
from engine.loader.checkpoint import open_model
from engine.models.blueprint import blueprint
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES
from engine.models.registry import FAMILIES
from engine.quantization.select import quantize
from engine.quantization.spec import QuantizationSpec
from engine.worker.footprint import footprint_of
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.engine.worker.graph_lab import CPU
from tests.parity.graph_lab import GraphAttention, use_graphs
from tests.parity.stepping import Sequence, Stepper
from tests.parity.test_graphs import MIXED, SIZES, capture, in_chunks, stepper_of
from tests.parity.tiny_models import VOCAB, prompts

pytestmark = pytest.mark.usefixtures("one_thread")
HIDDEN, INNER, EPS = 64, 96, 1e-5
# Of each layer: query heads, KV heads, head size, window, base of the rotation, whether its feed-forward is gated,
# and by what scores are multiplied.
LAYERS = [
    (4, 2, 32, 0, 10000.0, True, None),
    (8, 4, 16, 7, 500.0, False, 0.125),
    (4, 2, 32, 11, 10000.0, True, None),
    (2, 2, 64, 0, 500.0, True, None),
]


class Motley(DecoderLM):
    """No two layers of it are alike."""

    names = LLAMA_NAMES | {"layers.1.mlp.up": "model.layers.1.mlp.up_proj"}

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        layers = []
        for heads, kv_heads, head_dim, window, theta, gated, scale in LAYERS:
            rotary = Rotary(RopeSpec(theta), head_dim, build)
            mlp = GatedMLP(HIDDEN, INNER, "silu", build) if gated else MLP(HIDDEN, INNER, "gelu", build)
            attention = Attention(HIDDEN, heads, kv_heads, head_dim, build, rotary=rotary, window=window, scale=scale)
            layers.append(DecoderLayer(RMSNorm(HIDDEN, EPS, build), attention, RMSNorm(HIDDEN, EPS, build), mlp))
        return Stack(layers, RMSNorm(HIDDEN, EPS, build), tied=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint of random weights."""
    monkeypatch.setitem(FAMILIES, "MotleyForCausalLM", f"{__name__}.Motley")
    values = {"architectures": ["MotleyForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": len(LAYERS)}
    values |= {"vocab_size": VOCAB, "max_position_embeddings": 128, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    torch.manual_seed(0)
    rules = blueprint(open_model(str(tmp_path)).config).weights()
    made = {rule.name: torch.randn(rule.shape) * (0.2 if len(rule.shape) == 2 else 0.1) for rule in rules}
    for name in made:
        made[name] += name.endswith("norm.weight")
    save_file(made, tmp_path / "model.safetensors")
    return tmp_path, made


def rotated(x, theta):
    """[tokens, heads, head_dim], as RoFormer has it."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)).float(), theta ** (-torch.arange(half).float() / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def oracle(weights, tokens):
    """Logits after every token, in plain torch."""
    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    count = len(tokens)
    place = torch.arange(count)
    for number, (heads, kv_heads, head_dim, window, theta, gated, scale) in enumerate(LAYERS):

        def weight(name, number=number):
            return weights[f"model.layers.{number}.{name}.weight"]

        y = F.rms_norm(x, (HIDDEN,), weight("input_layernorm"), EPS)
        q, k, v = (F.linear(y, weight(f"self_attn.{part}_proj")).view(count, -1, head_dim) for part in "qkv")
        q, k = rotated(q, theta), rotated(k, theta)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        seen = place[None] <= place[:, None]
        if window:
            seen &= place[None] > place[:, None] - window
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or head_dim**-0.5)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        x = x + F.linear(attended.reshape(count, -1), weight("self_attn.o_proj"))
        y = F.rms_norm(x, (HIDDEN,), weight("post_attention_layernorm"), EPS)
        up = F.linear(y, weight("mlp.up_proj"))
        up = F.silu(F.linear(y, weight("mlp.gate_proj"))) * up if gated else F.gelu(up)
        x = x + F.linear(up, weight("mlp.down_proj"))
    return F.rms_norm(x, (HIDDEN,), weights["model.norm.weight"], EPS) @ weights["model.embed_tokens.weight"].t()


def settings(folder, **values):
    return EngineConfig(str(folder), **{"num_kv_blocks": 200, "block_size": 16, "device": "cpu", **values})


def check(weights, sequences, ragged):
    for sequence, prompt in zip(sequences, ragged, strict=True):
        expected = oracle(weights, sequence.tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(sequence.logits), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_tokens_are_those_of_plain_torch(folder, backend):
    path, weights = folder
    ragged = prompts(5, seed=3)
    runner = ModelRunner(settings(path, attention_backend=backend), SoloGroup())
    check(weights, Stepper(runner).generate(ragged, 6), ragged)


def test_two_ranks_say_the_same(folder, two_ranks):
    path, weights = folder
    ragged = prompts(3, seed=5)
    ranks = two_ranks(lambda group: ModelRunner(settings(path), group))

    def execute(inputs, draws):
        return two_ranks(lambda group: ranks[group.rank].execute(inputs, None if group.rank else draws))[0]

    pair = Stepper(SimpleNamespace(model=ranks[0].model, config=ranks[0].config, execute=execute))
    check(weights, pair.generate(ragged, 4), ragged)


def test_tokens_from_graphs_are_those_of_plain_torch(folder):
    path, weights = folder
    shape = {"block_size": 4, "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    runner = ModelRunner(settings(path, attention_backend="reference", **shape), SoloGroup())
    specs, kinds = attention_specs(runner.model.cached, runner.config, CPU)
    assert kinds == (0, 1, 0, 2)
    attention = UnlikeLayers([GraphAttention(spec) for spec in specs], kinds)
    device = use_graphs(runner, SIZES, attention=attention, mixed=MIXED)
    capture(runner)
    assert [pool.captured for pool in runner._forward.pools] == [(2, 8), (4, 16, 48)]
    ragged = prompts(5, seed=4)
    check(weights, stepper_of(runner).generate(ragged, 4), ragged)
    assert device.replays >= 3
    sequences, before = [Sequence(list(prompt)) for prompt in ragged], device.replays
    steps = in_chunks(stepper_of(runner), sequences, 3)
    check(weights, sequences, ragged)
    assert device.replays - before > 0.8 * steps > 3


def test_each_kind_of_layer_gets_its_own_part_of_the_plan(folder):
    class Planned(GraphAttention):
        """Its plan is as long as a query's head."""

        def mixed_plan_size(self, tokens, rows):
            return self.spec.head_dim

        def mixed_plan(self, layout, tokens, rows):
            return np.full(self.spec.head_dim, self.spec.head_dim, np.int32)

        def mixed_metadata(self, step, plan, max_seq_len):
            return plan.tolist()

    runner = ModelRunner(settings(folder[0], attention_backend="reference"), SoloGroup())
    specs, kinds = attention_specs(runner.model.cached, runner.config, CPU)
    attention = UnlikeLayers([Planned(spec) for spec in specs], kinds)
    plan = attention.mixed_plan(None, 16, 4)
    assert attention.mixed_plan_size(16, 4) == len(plan) == 32 + 16 + 64
    step = SimpleNamespace(input_ids=range(16), seq_lens=range(4))
    metadata = attention.mixed_metadata(step, torch.from_numpy(plan), 96)
    assert metadata == ([32] * 32, [16] * 16, [64] * 64)


@pytest.mark.parametrize("size", [1, 2])
def test_the_plan_counts_what_is_allocated_for_layers_that_are_unlike(folder, two_ranks, size):
    path, _ = folder
    config = settings(path, num_kv_blocks=None, kv_cache_memory_bytes=1 << 20, tensor_parallel_size=size)

    def held(group):
        runner = ModelRunner(config, group)
        cache = sum(tensor.untyped_storage().nbytes() for tensor in runner._cache.tensors)
        return runner.config, runner.model_config, cache

    resolved, model, cache = (two_ranks(held) if size == 2 else [held(SoloGroup())])[0]
    found = footprint_of(resolved, model)
    tokens = sum(2 * kv_heads // size * head_dim * 4 for _, kv_heads, head_dim, *_ in LAYERS)
    assert found.block_bytes == 16 * (tokens + 4)  # each token's id lies beside its keys and values
    assert cache == resolved.num_kv_blocks * found.block_bytes
    assert [layer.window for layer in found.attention] == [0, 7, 11, 0]


def test_layers_may_be_quantised_apart(folder):
    path, _ = folder
    model = blueprint(open_model(str(path)).config)
    asked = QuantizationSpec("int8", "int8", stored=False, ignore=("model.layers.1.mlp.up_proj",))
    quantize(model.layers, "layers", model.names, asked)
    assert [type(layer.mlp.up.method).__name__ for layer in model.layers] == [
        "Int8Linear",
        "PlainLinear",
        "Int8Linear",
        "Int8Linear",
    ]
