"""What our kernels compute of a model of transformers: found by what it does, whatever it is called."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rotation
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from engine.config import EngineConfig
from engine.kernels.base import TorchKernels
from engine.models.transformers.attention import Step
from engine.models.transformers.recognised import GatedForm, gated_form, norm_of
from engine.models.transformers.rotations import is_rotation, rotate
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.parity.census import model_config, save_oracle

SIZE, INNER = 6, 10


class Norm(nn.Module):
    """An RMSNorm of which one thing may be otherwise."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.tiny, self.other, self.change = 3e-5, 1e-3, change

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "centred":
            x = x - x.mean(-1, keepdim=True)
        mean = x.abs().mean(-1, keepdim=True) ** 2 if self.change == "absolute" else x.square().mean(-1, keepdim=True)
        normed = x * torch.rsqrt(mean + self.tiny)
        return normed * (2 + self.weight if self.change == "offset" else self.weight)


class FeedForward(nn.Module):
    """A gated feed-forward with the names of Llama's first code, of which one thing may be otherwise."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(SIZE, INNER), nn.Linear(INNER, SIZE)
        self.w3 = nn.Linear(SIZE, INNER, bias=change != "biased unlike")
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.w3(x)) if self.change == "gelu" else F.silu(self.w3(x))
        x = self.w1(2 * x if self.change == "scaled input" else x)
        out = self.w2(gate * x)
        return out + 1 if self.change == "more after" else out


def test_norms_are_known_with_their_offset_and_epsilon() -> None:
    assert norm_of(Norm()) == (0.0, 3e-5)
    assert norm_of(LlamaRMSNorm(SIZE, eps=1e-5)) == (0.0, 1e-5)
    assert norm_of(Gemma3RMSNorm(SIZE, eps=1e-4)) == (1.0, 1e-4)


@pytest.mark.parametrize("change", ["centred", "absolute", "offset"])
def test_what_is_nearly_a_norm_is_none(change: str) -> None:
    assert norm_of(Norm(change)) is None
    assert norm_of(nn.LayerNorm(SIZE, bias=False)) is None


def test_gated_feed_forwards_are_known_with_the_roles_of_their_layers() -> None:
    config = model_config("qwen3").hf.values
    assert gated_form(FeedForward()) == GatedForm(("w3", "w1"), "w2", "silu")
    for kind, up in ((Qwen3MLP, ("gate_proj", "up_proj")), (Phi3MLP, ("gate_up_proj",))):
        made = kind(_config(kind, config))
        assert gated_form(made) == GatedForm(up, "down_proj", "silu")


def _config(kind: type[nn.Module], values: object) -> object:
    from transformers import Phi3Config, Qwen3Config

    assert isinstance(values, dict)
    sizes = {name: values[name] for name in ("hidden_size", "intermediate_size")}
    return (Phi3Config if kind is Phi3MLP else Qwen3Config)(**sizes)


@pytest.mark.parametrize("change", ["gelu", "scaled input", "more after", "biased unlike"])
def test_what_is_nearly_a_gated_feed_forward_is_none(change: str) -> None:
    assert gated_form(FeedForward(change)) is None


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, change: str = "") -> tuple[Tensor, Tensor]:
    """Rotate as Llama does, or nearly."""

    def one(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1) if change != "neighbours" else (x[..., ::2], x[..., 1::2])
        turned = torch.cat((second, -first) if change == "the other way" else (-second, first), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    return one(query), key if change == "queries alone" else one(key)


def test_rotations_are_known_by_what_they_do_to_queries_and_keys() -> None:
    assert is_rotation(rotated)
    assert is_rotation(apply_rotary_pos_emb)
    for change in ("neighbours", "the other way", "queries alone"):
        assert not is_rotation(partial(rotated, change=change))
    assert not is_rotation(glm_rotation)
    assert not is_rotation(F.linear)


def test_what_our_kernels_cannot_rotate_is_left_to_the_models_own_function() -> None:
    """Another width than that of the layer's heads; angles that differ for the two features of a pair."""
    layer, step = Mock(head_dim=8, kernels=TorchKernels()), Step()
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    half = torch.randn(2, 1, 3, 4)
    cos, sin = torch.cat((half, half), dim=-1)
    with step.runs(Mock(), torch.arange(3)):
        for angles, plain in (((cos, sin), Mock()), (tuple(torch.randn(2, 1, 3, 8)), Mock(return_value="its own"))):
            found = rotate(layer, step, plain, query, key, *angles)
            if plain.called:
                assert found == "its own"
            else:
                torch.testing.assert_close(found, rotated(query, key, cos, sin))
        narrow = Mock(return_value="its own")
        assert rotate(layer, step, narrow, query[..., :4], key[..., :4], cos[..., :4], sin[..., :4]) == "its own"


STARTS = {
    "qwen3": "norms 9 Qwen3RMSNorm; gated feed-forwards 2 Qwen3MLP; rotations 2 Qwen3Attention; left to "
    "transformers: none",
    "qwen3_moe": "norms 9 Qwen3MoeRMSNorm; gated feed-forwards 2 Qwen3MoeExperts; rotations 2 Qwen3MoeAttention; ",
    "opt": "norms none; gated feed-forwards none; rotations none; left to transformers: none",
    "glm": "norms 5 GlmRMSNorm; gated feed-forwards 2 GlmMLP; rotations none; left to transformers: "
    "2 the rotation of GlmAttention",
}


@pytest.mark.parametrize(("kind", "said"), STARTS.items())
def test_a_line_at_the_start_says_what_is_computed_by_whom(
    kind: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_oracle(kind, tmp_path)
    caplog.set_level(logging.INFO, "engine.models.transformers.recognised")
    config = EngineConfig(str(tmp_path), device="cpu", num_kv_blocks=20, model_impl="transformers", max_model_len=64)
    ModelRunner(config, SoloGroup())
    assert f"computed by our kernels: {said}" in caplog.text
