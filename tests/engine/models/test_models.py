import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.kernels.base import TorchKernels
from engine.models.registry import ARCHITECTURES, architecture_of
from engine.models.rope import RotaryTable, inverse_frequencies
from engine.models.spec import RopeSpec
from parallel.group import SoloGroup
from tests.parity.tiny_models import CONFIGS, LLAMA3, SMALL


def read(name, **values):
    """Return the spec that the config.json of a tiny model, with some fields changed, stands for."""
    config = CONFIGS[name]()
    return architecture_of({**config.to_diff_dict(), "architectures": [NAMES[config.model_type]], **values})[1]


NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def test_registry_holds_the_five_architectures():
    assert set(ARCHITECTURES) == set(NAMES.values())


@pytest.mark.parametrize(
    "settings",
    [{"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}, LLAMA3, {**LLAMA3, "factor": 32.0}],
    ids=str,
)
def test_rope_frequencies_are_those_of_transformers(settings):
    config = transformers.LlamaConfig(**SMALL, head_dim=64, rope_parameters=dict(settings))
    expected, _ = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"))
    spec = architecture_of({**config.to_diff_dict(), "architectures": ["LlamaForCausalLM"]})[1]
    assert spec.rope is not None
    torch.testing.assert_close(inverse_frequencies(spec.rope, 64), expected)


def test_rotation_turns_pairs_of_features_by_position():
    table = RotaryTable(RopeSpec(theta=100.0), 4, 16, torch.device("cpu"))
    x = torch.randn(3, 2, 4)
    positions = torch.tensor([0, 5, 15], dtype=torch.int32)
    angles = torch.outer(positions.float(), torch.tensor([1.0, 0.1]))
    turned = torch.view_as_complex(torch.stack((x[..., :2], x[..., 2:]), -1)) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), -1)
    kernels = TorchKernels()
    turned = kernels.norm_rotate(x, None, kernels.rotation(table.rows(positions)), 0.0)
    torch.testing.assert_close(turned, expected)


def test_head_dim_defaults_to_a_share_of_the_width():
    assert read("llama").head_dim == 16
    assert read("llama", head_dim=None).head_dim == 16
    assert read("llama3_tied_biased").head_dim == 24


def test_mistral_without_a_window_sees_all():
    assert read("mistral", sliding_window=None).sliding_windows == (0, 0, 0)
    assert read("mistral", sliding_window=6).sliding_windows == (6, 6, 6)


def test_llama_alone_takes_its_biases_from_the_config():
    spec = read("llama3_tied_biased")
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.tied_embeddings) == (True, True, True, True)
    spec = read("qwen2")
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, False, False)


def test_every_parameter_of_the_decoder_is_filled_by_the_name_map():
    from engine.models.decoder import Decoder

    for name in CONFIGS:
        config = CONFIGS[name]()
        found, spec = architecture_of({**config.to_diff_dict(), "architectures": [NAMES[config.model_type]]})
        model = Decoder(spec, 32, SoloGroup(), torch.float32)
        assert {rule.target for rule in found.weights(spec)} == {n for n, _ in model.named_parameters()}
