import json
import re
import shutil
from itertools import pairwise

import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.layers.embedding import ROW_MULTIPLE
from engine.loader.checkpoint import find_checkpoint, open_model, read_config
from engine.loader.safetensors_file import TensorOnDisk
from engine.loader.weights import load_model
from engine.models.blueprint import blueprint
from engine.quantization.select import quantization_of
from parallel.errors import ShardingError
from parallel.group import SoloGroup
from tests.parity.tiny_models import LLAMA3, make


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint of each kind that the tests need, made once."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("llama", "llama3_tied_biased", "gpt2", "qwen2"):
        make(name, root / name)
    make("llama", root / "sharded", max_shard_size="50KB")
    return root


@pytest.fixture
def folder(saved, tmp_path):
    """Return a function that copies a checkpoint, so that the test may spoil it."""

    def copy(name):
        return shutil.copytree(saved / name, tmp_path / name)

    return copy


def load(path, group=None, dtype=torch.float32, impl="auto"):
    opened = open_model(str(path), impl=impl)
    return load_model(opened, opened.config.max_positions, group or SoloGroup(), dtype)


def edit_config(path, **values):
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.update(values)
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_weights(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def weights(model):
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


def refused(path, *words, impl="auto"):
    with pytest.raises(CheckpointError) as error:
        load(path, impl=impl)
    for word in words:
        assert word in str(error.value)


def test_sharded_files_hold_the_same_model(saved):
    assert len(list((saved / "sharded").glob("*.safetensors"))) > 3
    whole, sharded = weights(load(saved / "llama")), weights(load(saved / "sharded"))
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=0, atol=0)


def test_weights_are_cast_to_the_dtype_asked_for(saved):
    assert {p.dtype for p in load(saved / "llama", dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_missing_tensor_is_named(folder):
    path = folder("llama")
    edit_weights(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(path, "missing", "model.layers.1.mlp.up_proj.weight")


def test_extra_tensor_is_named(folder):
    path = folder("llama")
    edit_weights(path, lambda tensors: tensors.update({"model.layers.1.surprise": torch.zeros(2)}))
    refused(path, "not part of this architecture", "model.layers.1.surprise")


def test_misshaped_tensor_is_named_with_both_shapes(folder):
    path = folder("llama")
    edit_weights(path, lambda tensors: tensors.update({"model.layers.2.mlp.down_proj.weight": torch.zeros(64, 95)}))
    refused(path, "model.safetensors", "model.layers.2.mlp.down_proj.weight", "[64, 95]", "[64, 96]")


def test_many_missing_tensors_are_counted(folder):
    path = folder("llama")
    edit_config(path, num_hidden_layers=6)
    refused(path, "missing", "more")


@pytest.mark.parametrize("keep", [4, 100, 3000])
def test_truncated_file_is_named(folder, keep):
    path = folder("llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-keep] if keep == 4 else file.read_bytes()[:keep])
    refused(path, "model.safetensors", "truncated or damaged")


def test_missing_shard_is_named(folder):
    path = folder("sharded")
    gone = sorted(path.glob("model-*.safetensors"))[1]
    gone.unlink()
    refused(path, gone.name, "missing")


def test_shard_without_its_tensor_is_named(folder):
    path = folder("sharded")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.norm.weight"]
    tensors = load_file(path / file)
    del tensors["model.norm.weight"]
    save_file(tensors, path / file)
    refused(path, file, "model.norm.weight")


def test_index_cannot_point_outside_the_folder(folder):
    path = folder("sharded")
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = "../llama/model.safetensors"
    file.write_text(json.dumps(index))
    refused(path, "outside the folder")


def test_pickled_weights_are_refused(folder):
    path = folder("llama")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "pytorch_model.bin", "safetensors")


def test_folder_without_weights_or_config(folder):
    path = folder("llama")
    (path / "model.safetensors").unlink()
    refused(path, "neither model.safetensors nor")
    (path / "config.json").unlink()
    refused(path, "config.json is missing")


def test_damaged_config_is_named(folder):
    path = folder("llama")
    (path / "config.json").write_text("{")
    refused(path, "config.json", "JSON")


def test_buffers_among_the_weights_are_ignored(folder):
    path = folder("llama")
    edit_weights(
        path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    )
    load(path)
    path = folder("gpt2")
    edit_weights(path, lambda tensors: tensors.update({"transformer.h.0.attn.bias": torch.zeros(1, 1, 8, 8)}))
    load(path)


def test_gpt2_saved_without_its_outer_module(saved, folder):
    path = folder("gpt2")

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    edit_weights(path, strip)
    expected, found = weights(load(saved / "gpt2")), weights(load(path))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_a_tied_head_in_the_file_must_be_the_embedding(saved, folder):
    path = folder("llama3_tied_biased")
    edit_weights(
        path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    model = load(path)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.abs().sum() > 0
    edit_weights(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(199, 64)}))
    refused(path, "lm_head.weight differs", "set tie_word_embeddings to false")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["architectures"]),
        ({"quantization_config": {"quant_method": "aqlm"}}, ["quantization_config", "aqlm"]),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0}}, ["ntk", "default, linear"]),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, ["short_factor", "8 numbers"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": 3}}, ["truncate", "true or false"]),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ["factor"]),
        ({"partial_rotary_factor": 0.2}, ["partial_rotary_factor"]),
        ({"hidden_act": "xielu"}, ["hidden_act", "xielu", "silu"]),
        ({"hidden_size": "64"}, ["hidden_size", "integer"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"attention_bias": "yes"}, ["attention_bias", "true or false"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads = 4", "num_key_value_heads = 3"]),
    ],
    ids=str,
)
def test_unsupported_config_is_refused_before_any_weight(folder, values, words):
    path = folder("llama")
    (path / "model.safetensors").unlink()
    edit_config(path, **values)
    refused(path, *words, impl="native")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_sliding_window": True, "layer_types": ["linear_attention"] * 3}, ["linear_attention"]),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, ["layer_types", "3 layers"]),
    ],
    ids=str,
)
def test_unknown_layer_types_are_refused(folder, values, words):
    path = folder("qwen2")
    edit_config(path, **values)
    refused(path, *words)


def test_unsupported_gpt2_variants_are_refused(folder):
    path = folder("gpt2")
    edit_config(path, scale_attn_by_inverse_layer_idx=True)
    refused(path, "scale_attn_by_inverse_layer_idx", impl="native")


def test_old_and_new_rope_settings_mean_the_same(folder):
    path = folder("llama3_tied_biased")
    new = load(path).of_positions[0].table
    old = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    edit_config(path, rope_parameters=..., rope_theta=10000.0, rope_scaling=old, dtype=..., torch_dtype="float32")
    assert torch.equal(load(path).of_positions[0].table, new)


def windows(path):
    return [layer.window for layer in blueprint(open_model(str(path)).config).attention]


def test_sliding_window_is_off_unless_used(folder):
    path = folder("qwen2")
    edit_config(path, sliding_window=4, layer_types=..., use_sliding_window=False)
    assert windows(path) == [0, 0, 0]
    edit_config(path, sliding_window=4, use_sliding_window=True, max_window_layers=2)
    assert windows(path) == [0, 0, 4]


def test_remote_code_is_ignored(folder, caplog):
    path = folder("llama")
    (path / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(path, auto_map={"AutoModelForCausalLM": "evil.Model"})
    load(path)
    assert "auto_map" in caplog.text


def test_end_of_sequence_ids_come_from_both_configs(folder):
    path = folder("llama")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 99999]}))
    assert open_model(str(path)).config.eos_token_ids == (2, 7)


def test_unknown_model_is_refused_in_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model, word in (("no-such/model", "hub"), (str(tmp_path / "nowhere"), "is not a folder"), ("a b c", "hub")):
        with pytest.raises(CheckpointError, match=word) as error:
            find_checkpoint(model)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_share_of_the_weights_that_is_read_grows_to_all(saved, quantization):
    opened, told = open_model(str(saved / "llama")), []
    made = quantization_of(EngineConfig("m", quantization=quantization, device="cpu"), None)
    load_model(opened, opened.config.max_positions, SoloGroup(), torch.float32, made, told=told.append)
    assert all(later > earlier - 1e-9 for earlier, later in pairwise(told))
    assert len(told) > 3
    assert 0 < told[0] < 0.9
    assert told[-1] == pytest.approx(1.0)


def test_the_config_may_be_told_to_say_something_else(tmp_path, saved):
    path = shutil.copytree(saved / "llama", tmp_path / "model")
    said = open_model(str(path), overrides='{"rms_norm_eps": 0.5, "max_position_embeddings": 33}').config
    assert (said.raw["rms_norm_eps"], said.max_positions) == (0.5, 33)
    edit_config(path, text_config={"hidden_size": 8, "vocab_size": 9})
    merged = read_config(path, '{"text_config": {"vocab_size": 10}, "rope_scaling": {"rope_type": "yarn"}}')
    assert merged["text_config"] == {"hidden_size": 8, "vocab_size": 10}, "the rest of a text half stays"
    assert merged["rope_scaling"] == {"rope_type": "yarn"}, "other objects are replaced whole"


def test_hub_id_is_found_in_the_cache(monkeypatch, saved, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    shutil.copytree(saved / "llama", repository / "snapshots" / "0123abcd")
    assert len(load(find_checkpoint("some/llama")).layers) == 3


class OneOfTwo(SoloGroup):
    """Rank 1 of a group of two, as far as loading goes."""

    def __init__(self):
        super().__init__()
        self.rank, self.size = 1, 2


@pytest.fixture
def counts(monkeypatch):
    """The elements that are read from disk, each time."""
    read_into, pick_into = TensorOnDisk.read_into, TensorOnDisk.pick_into
    counts = []

    def read(self, element, target):
        counts.append(target.numel())
        read_into(self, element, target)

    def pick(self, element, shape, inner, target):
        counts.append(target.numel())
        pick_into(self, element, shape, inner, target)

    monkeypatch.setattr(TensorOnDisk, "read_into", read)
    monkeypatch.setattr(TensorOnDisk, "pick_into", pick)
    return counts


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_rank_reads_only_its_slices(saved, counts, name):
    load(saved / name, OneOfTwo())
    half = sum(counts)
    counts.clear()
    whole = sum(p.numel() for p in load(saved / name).parameters())
    padding = 2 * ROW_MULTIPLE * 64  # of the vocabulary, in table and head: ranks share it by whole runs
    assert sum(counts) + padding >= whole, "padding apart, each is read"
    replicated = 256 * 64 if name == "gpt2" else 0  # the learned positions
    assert half - replicated < 0.55 * (whole - replicated) + padding


def test_sizes_that_cannot_be_split_are_refused_before_any_weight(folder):
    path = folder("llama")
    (path / "model.safetensors").unlink()
    group = OneOfTwo()
    group.size = 3
    with pytest.raises(ShardingError, match="num_attention_heads"):
        load(path, group)


def test_gated_model_says_what_to_do(monkeypatch):
    request = httpx.Request("GET", "http://127.0.0.1/")

    def gated(*args, **kwargs):
        raise GatedRepoError("gated", response=httpx.Response(403, request=request))

    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    with pytest.raises(CheckpointError, match="accept its terms"):
        find_checkpoint("some/gated")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_load_alike_stacked_and_one_by_one(tmp_path, name):
    """transformers saves each expert's weights by themselves; in memory, and in some files, they are stacked."""
    make(name, tmp_path)
    expected = weights(load(tmp_path))

    def stack(tensors):
        found = [re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", tensor) for tensor in list(tensors)]
        for prefix in dict.fromkeys(match[1] for match in found if match):
            parts = {}
            for match in found:
                if match and match[1] == prefix:
                    parts.setdefault(match[3], []).append((int(match[2]), tensors.pop(match[0])))
            parts = {part: torch.stack([tensor for _, tensor in sorted(each)]) for part, each in parts.items()}
            gate, up, down = ("w1", "w3", "w2") if "w1" in parts else ("gate_proj", "up_proj", "down_proj")
            tensors[f"{prefix}.gate_up_proj"] = torch.cat((parts[gate], parts[up]), 1)
            tensors[f"{prefix}.down_proj"] = parts[down]

    edit_weights(tmp_path, stack)
    stacked = weights(load(tmp_path))
    assert stacked.keys() == expected.keys()
    assert all(torch.equal(stacked[name], expected[name]) for name in expected)


def test_a_layer_that_predicts_several_tokens_is_not_run(tmp_path):
    """DeepSeek-V3 and GLM-4.5 keep it behind the layers that the config counts."""
    make("deepseek_v3", tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    edit_weights(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(4)}))
    load(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.zeros(4)}))
    refused(tmp_path, "not part of this architecture", "model.layers.4.eh_proj.weight")
