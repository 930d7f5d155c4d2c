"""gpt-oss with experts in MXFP4: what they stand for, what they say, what they take, and what is refused."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from engine.errors import CheckpointError
from engine.kernels import compiler
from engine.layers.moe import Experts
from engine.loader.checkpoint import open_model
from engine.loader.safetensors_file import TensorOnDisk
from engine.loader.weights import load_model
from engine.quantization.four_bits import plain_four_bits
from engine.quantization.spec import QuantizationSpec
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.parity.stepping import Stepper
from tests.parity.stored_formats import config, edit
from tests.parity.test_stored_formats import gang
from tests.parity.tiny_models import check_against, make, oracle_logits, prompts

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC = QuantizationSpec("mxfp4", "mxfp4", layout="blocks", group=32)
EXPERTS, HIDDEN, INNER = 6, 64, 96


def random_blocks(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers(dtype):
    blocks, scales = random_blocks(10, 64)
    expected = _convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    recipe = plain_four_bits(SPEC, 10, 64, dtype)
    for each in range(EXPERTS):
        found = recipe.make({"blocks": blocks[each], "scales": scales[each]})
        assert torch.equal(found, expected[each].t())


def test_all_sixteen_numbers_are_those_of_the_specification():
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8)[None, None]
    tensors = {"blocks": blocks, "scales": torch.tensor([[128]], dtype=torch.uint8)}
    made = plain_four_bits(SPEC, 1, 32, torch.float32).make(tensors)
    half = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert made[0].tolist() == [*half, *(-each for each in half)] * 2


@pytest.fixture
def checkpoints(tmp_path):
    """Return two folders with the same weights, one with plain experts, one with MXFP4."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder in (plain, packed):
        make("gpt_oss", folder)
    tensors = {folder: load_file(folder / "model.safetensors") for folder in (plain, packed)}
    for name in [name for name in tensors[packed] if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = random_blocks(2 * INNER, HIDDEN) if "gate_up" in name else random_blocks(HIDDEN, INNER)
        tensors[plain][name] = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del tensors[packed][name]
        tensors[packed] |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for folder, found in tensors.items():
        save_file(found, folder / "model.safetensors")
    edit(packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain, packed


def runner(folder):
    return ModelRunner(config(folder, dtype="float32", block_size=16), SoloGroup())


def oracle(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("isa", compiler.isas() or [compiler.NATIVE])
def test_experts_in_four_bits_say_what_the_plain_ones_say(checkpoints, isa, monkeypatch):
    """And take the room of four bits and their scales."""
    monkeypatch.setenv(compiler.ISA_VARIABLE, isa)
    plain, packed = checkpoints
    ragged, held = prompts(3, seed=4), runner(packed)
    check_against(oracle(plain), Stepper(held).generate(ragged, 6), ragged)
    experts = [part for part in held.model.modules() if isinstance(part, Experts)]
    layers = [layer for part in experts for each in (part.up, part.down) for layer in each.values()]
    assert {type(layer.method).__name__ for layer in layers} <= {"NativeFourBitLinear", "FourBitLinear"}
    taken = sum(tensor.nbytes for layer in layers for tensor in layer.method.tensors())
    outs = [-(-outs // 64) * 64 * ins for outs, ins in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]  # in panels of 64
    assert 0 < taken <= sum(outs) * EXPERTS * len(experts) * (0.5 + 1 / 32)


def test_in_bfloat16_a_token_has_the_same_logits_alone_and_in_company(checkpoints):
    """As far from those in fp32 as the plain weights' are, whatever is scaled: weights, or the sums of groups."""
    plain, packed = checkpoints
    model, ragged, far = oracle(plain), prompts(3, seed=4), []
    for folder in (plain, packed):
        stepper = Stepper(ModelRunner(config(folder, dtype="bfloat16", block_size=16), SoloGroup()))
        distances = []
        for sequence, prompt in zip(stepper.generate(ragged, 3), ragged, strict=True):
            (alone,) = stepper.generate([prompt], 3)
            assert torch.equal(torch.stack(sequence.logits), torch.stack(alone.logits))
            expected = oracle_logits(model, sequence.tokens)[len(prompt) - 1 : -1]
            distances.append(float((torch.stack(sequence.logits).float() - expected).norm() / expected.norm()))
        far.append(sum(distances) / len(distances))
    assert far[1] < 1.3 * far[0]


@pytest.mark.parametrize("whole", [False, True])
def test_two_ranks_say_the_same(two_ranks, checkpoints, whole):
    """Each with a share of every expert, or with whole ones."""
    plain, packed = checkpoints
    asked = config(packed, dtype="float32", tensor_parallel_size=2, enable_expert_parallel=whole)
    ragged = prompts(2, seed=4)
    check_against(oracle(plain), gang(two_ranks, asked).generate(ragged, 4), ragged)


def test_what_is_on_disk_is_in_memory_for_one_product_at_a_time(checkpoints, monkeypatch):
    read, sizes = TensorOnDisk.__getitem__, []

    def watched(self, index):
        found = read(self, index)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(TensorOnDisk, "__getitem__", watched)
    opened = open_model(str(checkpoints[1]))
    load_model(opened, 64, SoloGroup(), torch.float32, opened.config.quantization)
    assert max(sizes) == 2 * INNER * HIDDEN // 2  # the codes of one expert


def changed(packed, name, change):
    tensors = load_file(packed / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, packed / "model.safetensors")


def test_exponents_that_are_no_number_are_named(checkpoints):
    _, packed = checkpoints
    changed(packed, "model.layers.1.mlp.experts.down_proj_scales", lambda scales: scales * 0 + 255)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_scales holds .* no finite number"):
        runner(packed)


def test_too_few_experts_are_named(checkpoints):
    _, packed = checkpoints
    changed(packed, "model.layers.0.mlp.experts.gate_up_proj_blocks", lambda blocks: blocks[:4].clone())
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks has shape \[4, 192, 2, 16\]"):
        runner(packed)


def test_other_families_do_not_hold_experts_so(models, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(models("qwen3_moe")[1], folder)
    edit(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"experts\.0.*mxfp4 is for experts in one tensor, as in gpt-oss"):
        runner(folder)


def test_scales_that_are_missing_are_named(checkpoints):
    _, packed = checkpoints
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.experts\.down_proj_scales"):
        runner(packed)
