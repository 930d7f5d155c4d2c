from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import CheckpointError
from engine.kernels.base import TorchKernels
from engine.layers.base import Build, checkpoint_names
from engine.layers.rope import RopeSpec, Rotary, inverse_frequencies
from engine.models.blueprint import blueprint, build_model
from engine.models.config import ModelConfig
from engine.models.facts import default_config, model_types
from engine.models.registry import FAMILIES, implementation
from engine.models.rope_config import read_rope
from parallel.group import SoloGroup
from tests.parity.tiny_models import CONFIGS, LLAMA3, LONGROPE, RECURRENT, SMALL, YARN, make


def config_of(config, **values):
    """Return what is read of a config of transformers with some fields changed."""
    return ModelConfig.of({**config.to_diff_dict(), "architectures": [NAMES[config.model_type]], **values})


def built(name, **values):
    """Return the model, without weights, that the config of a tiny one with some fields changed stands for."""
    return blueprint(config_of(CONFIGS[name](), **values))


NAMES = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def test_every_architecture_of_the_registry_is_tested():
    tested = {NAMES[make_config().model_type] for make_config in (CONFIGS | RECURRENT).values()}
    assert set(FAMILIES) <= tested


SAID = ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads", "head_dim", "layer_types")
SIZES = ("intermediate_size", "moe_intermediate_size", "layers_block_type", "mlp_layer_types", "architectures")
ASKED = ("eps", "window", "scale", "softcap", "chunk", "activation", "routing")


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name != "GPT2LMHeadModel"])
def test_what_config_json_leaves_out_is_what_transformers_assumes(architecture):
    types = next(types for name, types in model_types().items() if name == architecture)
    full = dict(default_config(architecture, tuple(types)).raw) | {"num_hidden_layers": 2}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if full.get(name):
            full[name] = full[name][-2:]
    short = {name: value for name, value in full.items() if name in (*SAID, *SIZES)} | {"num_hidden_layers": 2}
    made, assumed = (blueprint(ModelConfig.of(values)) for values in (full, short))
    assert {name: part.shape for name, part in made.named_parameters()} == {
        name: part.shape for name, part in assumed.named_parameters()
    }
    for part, other in zip(made.modules(), assumed.modules(), strict=True):
        for name in ASKED:
            assert getattr(part, name, None) == getattr(other, name, None), (type(part), name)
    for name in ("embedding_scale", "logit_divisor", "softcap"):
        assert getattr(made, name) == getattr(assumed, name)


def test_a_part_of_a_head_is_rotated_where_transformers_class_rotates_it():
    """That of Llama rotates all of it in the default rope, whatever the file says; others are served so by `auto`."""
    llama, part = config_of(CONFIGS["llama"]()).raw, {"partial_rotary_factor": 0.5}
    plain = replace(ModelConfig.of(llama | part), implementation="native")
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor = 0\.5 is not supported here, only 1\.0"):
        blueprint(plain)
    assert type(blueprint(replace(plain, falls_back=True))).__name__ == "TransformersModel"
    stretched = {"rope_parameters": YARN | part}
    assert blueprint(ModelConfig.of(llama | stretched)).of_positions[0].feature_order is not None
    glm = config_of(CONFIGS["glm4_moe"]()).raw
    assert blueprint(ModelConfig.of(glm)).of_positions[0].feature_order is not None


def test_a_window_that_is_null_is_none_though_it_is_used():
    for kind in ("qwen2", "qwen3", "qwen3_moe"):
        said = {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0, "layer_types": None}
        model = blueprint(ModelConfig.of(config_of(CONFIGS[kind]()).raw | said | {"max_position_embeddings": 8192}))
        assert {layer.window for layer in model.attention} == {0}


def test_a_field_that_is_null_is_said():
    """The window of Mistral, which its file leaves out or sets to null where there is none."""
    mistral = config_of(CONFIGS["mistral"]()).raw | {"max_position_embeddings": 8192}
    without = {name: value for name, value in mistral.items() if name != "sliding_window"}
    for values, window in (
        (without, 4096),
        ({**mistral, "sliding_window": None}, 0),
        ({**mistral, "sliding_window": 64}, 64),
    ):
        model = blueprint(ModelConfig.of(values))
        assert {layer.window for layer in model.attention} == {window}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0},
        LLAMA3,
        {**LLAMA3, "factor": 32.0},
        YARN,
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5, "truncate": False},
        {**YARN, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.5},
        {**YARN, "partial_rotary_factor": 0.5},
        {**LONGROPE, "short_factor": [1.0 + i / 10 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]},
    ],
    ids=str,
)
@pytest.mark.parametrize("longest", [64, 256])
def test_rope_frequencies_are_those_of_transformers(settings, longest):
    config = transformers.LlamaConfig(**SMALL, head_dim=64, rope_parameters=dict(settings))
    expected, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"), seq_len=longest)
    rope = read_rope(config_of(config).hf, 64, longest)
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected)
    assert rope.attention_factor == pytest.approx(factor)


def test_a_rope_that_changes_with_a_sequence_is_refused_where_it_would():
    settings = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0}
    config = config_of(transformers.LlamaConfig(**SMALL, rope_parameters=settings))
    with pytest.raises(CheckpointError, match=r"rope_type 'dynamic' .* set max_model_len to 256"):
        read_rope(config.hf, 16, 257)


@pytest.mark.parametrize("interleaved", [False, True])
def test_features_that_turn_together_lie_half_a_head_apart_and_the_others_are_not_turned(interleaved):
    rope = RopeSpec(theta=100.0, rotated=4, interleaved=interleaved, attention_factor=2.0)
    rotary = Rotary(rope, 8, Build(SoloGroup(), torch.float32, 16))
    head = torch.arange(8.0)[rotary.feature_order].view(1, 1, 8)
    kernels = TorchKernels()
    turned = kernels.norm_rotate(head, None, kernels.rotation(rotary.rows(torch.tensor([3]))), 0.0).flatten()
    pairs = torch.tensor([[0.0, 1.0], [2.0, 3.0]] if interleaved else [[0.0, 2.0], [1.0, 3.0]])
    expected = torch.view_as_complex(pairs) * torch.polar(torch.full((2,), 2.0), torch.tensor([3.0, 0.3]))
    torch.testing.assert_close(turned[[0, 1, 4, 5]], torch.cat((expected.real, expected.imag)))
    assert turned[[2, 3, 6, 7]].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_rotation_turns_pairs_of_features_by_position():
    table = Rotary(RopeSpec(theta=100.0), 4, Build(SoloGroup(), torch.float32, 16))
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
    assert built("llama").attention[0].head_dim == 16
    assert built("llama", head_dim=None).attention[0].head_dim == 16
    assert built("llama3_tied_biased").attention[0].head_dim == 24


def test_mistral_without_a_window_sees_all():
    assert [layer.window for layer in built("mistral", sliding_window=None).attention] == [0, 0, 0]
    assert [layer.window for layer in built("mistral", sliding_window=6).attention] == [6, 6, 6]


def test_a_window_that_no_sequence_outgrows_is_none():
    assert [layer.window for layer in built("mistral", sliding_window=256).attention] == [0, 0, 0]


def test_llama_alone_takes_its_biases_from_the_config():
    model = built("llama3_tied_biased")
    layer = model.layers[0]
    parts = (layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down)
    assert all(part.bias is not None for part in parts)
    assert model.head.weight is model.embedding.weight
    layer = built("qwen2").layers[0]
    assert layer.attention.qkv.bias is not None
    assert layer.attention.output.bias is layer.mlp.up.bias is layer.mlp.down.bias is None


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_familys_rules_are_the_tensors_that_transformers_saves_with_their_shapes(name, size, tmp_path):
    make(name, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    config = CONFIGS[name]()
    if config.tie_word_embeddings:
        saved.pop("lm_head.weight", None)
    model = blueprint(config_of(config), size)
    rules = list(model.weights())
    assert {rule.name: shape_on_disk(rule, rules) for rule in rules} == {n: tuple(t.shape) for n, t in saved.items()}
    assert {rule.target for rule in rules} == {n for n, _ in model.named_parameters()}


def shape_on_disk(rule, rules):
    if rule.index is None:
        return rule.shape
    return (len({other.index for other in rules if other.name == rule.name}), *rule.shape)


def test_experts_are_named_by_their_layer_and_their_number():
    names = {
        "layers.*.mlp.experts.*.down": "model.layers.*.mlp.experts.*.down_proj",
        "layers.1.mlp.down": "first.down",
    }
    assert checkpoint_names(names, "layers.3.mlp.experts.17.down") == ("model.layers.3.mlp.experts.17.down_proj",)
    assert checkpoint_names(names, "layers.1.mlp.down") == ("first.down",)


def test_gpt2_assumes_what_transformers_does_where_its_config_says_nothing():
    model = blueprint(ModelConfig.of({"architectures": ["GPT2LMHeadModel"]}))
    expected = transformers.GPT2Config()
    assert (model.hidden_size, model.vocab_size, len(model.layers)) == (expected.n_embd, expected.vocab_size, 12)
    assert ModelConfig.of({"architectures": ["GPT2LMHeadModel"]}).eos_token_ids == (expected.eos_token_id,)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_stablelm_has_the_tensors_that_its_fields_ask_for(parallel, normed, biased):
    config = transformers.StableLmConfig(
        **SMALL, use_parallel_residual=parallel, qk_layernorm=normed, use_qkv_bias=biased
    )
    with torch.device("meta"):
        expected = transformers.StableLmForCausalLM(config).state_dict()
    rules = blueprint(config_of(config), 2).weights()
    assert {rule.name: rule.shape for rule in rules} == {n: tuple(t.shape) for n, t in expected.items()}


def test_stablelm_rotates_a_quarter_of_a_head_where_its_config_says_nothing():
    said, silent, half = (
        built("stablelm_parallel", rope_parameters=rope).of_positions[0].feature_order
        for rope in ({"partial_rotary_factor": 0.25}, None, {"partial_rotary_factor": 0.5})
    )
    assert said == silent != half


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_dim": 32}, "head_dim = 32 is not supported, only 16"),
        ({"hidden_size": 66}, "hidden_size = 66 is not a multiple of num_attention_heads = 4"),
        ({"hidden_act": "tanh"}, "hidden_act = 'tanh' is not supported; known: silu, "),
        ({"qk_layernorm": 1}, "qk_layernorm must be true or false, not 1"),
    ],
    ids=str,
)
def test_stablelm_refuses_by_name_what_it_does_not_implement(values, message):
    with pytest.raises(CheckpointError, match=message):
        built("stablelm", **values)


def rotated_and_window(model):
    """Return of each layer whether it is rotated, and how many tokens it sees; 0 = all."""
    return [(layer.rotary is not None, layer.window) for layer in model.attention]


def test_layers_of_cohere2_with_a_window_are_rotated_and_those_that_see_all_are_not():
    seen, near = (False, 0), (True, 9)
    assert rotated_and_window(built("cohere2")) == [near, seen, near]
    silent = {"layer_types": None, "num_hidden_layers": 8}
    assert rotated_and_window(built("cohere2", **silent)) == [near, near, near, seen] * 2
    assert rotated_and_window(built("cohere2", **silent, sliding_window_pattern=2)) == [near, seen] * 4
    assert rotated_and_window(built("cohere2", sliding_window=512)) == [(True, 0), seen, (True, 0)]


@pytest.mark.parametrize(("name", "theta"), [("cohere_variant", 5e5), ("cohere2_variant", 1e4)])
def test_cohere_rotates_as_transformers_does_where_its_config_says_nothing(name, theta):
    assert CONFIGS[name]().rope_parameters == {"rope_type": "default", "rope_theta": theta}
    config, build = config_of(CONFIGS[name](), rope_parameters=None), Build(SoloGroup(), torch.float32, 16)
    (rotary,) = build_model(config, build).of_positions
    assert torch.equal(rotary.table, Rotary(RopeSpec(theta), 16, build).table)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("cohere", {"hidden_act": "tanh"}, "hidden_act = 'tanh' is not supported; known: silu, "),
        ("cohere", {"use_qk_norm": 1}, "use_qk_norm must be true or false, not 1"),
        ("cohere2", {"layer_types": ["chunked_attention"] * 3}, "layer_types has 'chunked_attention'"),
        ("cohere2", {"sliding_window": None}, "sliding_window must be an integer of at least 1, not None"),
    ],
    ids=str,
)
def test_cohere_refuses_by_name_what_it_does_not_implement(name, values, message):
    with pytest.raises(CheckpointError, match=message):
        built(name, **values)


def test_an_architecture_without_a_family_goes_to_transformers_unless_native_is_asked_for():
    assert implementation("LlamaForCausalLM") == "native"
    assert implementation("LlamaForCausalLM", "transformers") == "transformers"
    assert implementation("GemmaForCausalLM") == "transformers"
    with pytest.raises(
        CheckpointError, match=r"'GemmaForCausalLM' has no native family; known: .*GPT2LMHeadModel, .*Llama"
    ):
        implementation("GemmaForCausalLM", "native")
