"""Experts whole on ranks, rows exchanged: the tokens of transformers, and the bits of one rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.base import Build
from engine.layers.moe import MoE, Routing, first_experts
from engine.loader.checkpoint import open_model
from engine.loader.weights import load_model
from engine.resolve import check_model, resolve
from engine.worker.footprint import footprint_of
from parallel.group import Group, SoloGroup
from tests.engine.thread_group import on_ranks
from tests.parity.census import check, save_oracle
from tests.parity.tiny_models import make

COUNT = 7
ROUTINGS = {
    "softmax": Routing(COUNT, 3, renormalise=True),
    "sigmoid": Routing(COUNT, 2, scores="sigmoid", correction=True, scale=1.5),
    "chosen": Routing(COUNT, 1, scores="chosen", bias=True),
    "scaled inputs": Routing(COUNT, 2, scores="sigmoid", scales_input=True),
}


@pytest.mark.parametrize(
    ("count", "size", "expected"), [(8, 2, [0, 4, 8]), (5, 4, [0, 2, 3, 4, 5]), (2, 4, [0, 1, 2, 2, 2])]
)
def test_the_first_ranks_hold_one_more(count: int, size: int, expected: list[int]) -> None:
    assert first_experts(count, size) == expected


def layer(group: Group, routing: Routing, *, expert_parallel: bool = True, shared_inner: int = 0) -> MoE:
    """Return a layer whose weights are those of any other of the same routing, wherever they lie."""
    made = MoE(16, 24, "silu", routing, Build(group, torch.float32, 64, expert_parallel), shared_inner=shared_inner)
    for name, parameter in made.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ROUTINGS)
@torch.inference_mode()
def test_a_token_has_the_bits_of_one_rank(size: int, kind: str) -> None:
    routing = ROUTINGS[kind]
    whole = layer(SoloGroup(), routing)

    def act(group: Group) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [layer(group, routing)(x) for x in steps]

    steps = [torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens)) for tokens in (1, 2, 5, 17)]
    # Rows of one product have the same bits in any number here: each expert's are multiplied one by one.
    steps = [row for x in steps for row in x.split(1)] + steps
    expected = [whole(x) for x in steps]
    for found in on_ranks(size, act):
        for x, one, other in zip(steps, found, expected, strict=True):
            if len(x) == 1:
                assert torch.equal(one, other)
            else:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_token_has_the_same_bits_wherever_it_stands_beside_a_shared_expert() -> None:
    """Which rank adds up its experts depends on its place in the step."""
    rows = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))

    def act(group: Group) -> list[torch.Tensor]:
        with torch.inference_mode():
            moe = layer(group, ROUTINGS["softmax"], shared_inner=32)
            moe.shared.down.weight.mul_(1 + group.rank)  # each rank has a part of its own
            return [moe(torch.stack([row, row]))[place] for row in rows for place in range(2)]

    for found in on_ranks(2, act):
        assert all(torch.equal(first, last) for first, last in zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_two_ranks_give_the_tokens_of_transformers(model_type: str, tmp_path: Path) -> None:
    check(save_oracle(model_type, tmp_path), 2, "native", enable_expert_parallel=True)


def test_experts_of_the_transformers_library_are_spread_too(tmp_path: Path) -> None:
    check(save_oracle("qwen3_moe", tmp_path), 2, "transformers", enable_expert_parallel=True)


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "qwen3_moe", "llama4_text"])
def test_four_ranks_give_the_tokens_of_transformers(model_type: str, tmp_path: Path) -> None:
    check(save_oracle(model_type, tmp_path, num_key_value_heads=4), 4, "native", enable_expert_parallel=True)


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_a_plan_counts_the_experts_of_the_rank_that_has_most(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    folder = open_model(str(tmp_path))
    asked = EngineConfig(str(tmp_path), device="cpu", tensor_parallel_size=2, enable_expert_parallel=True)
    config = resolve(asked, folder.config)
    found = footprint_of(config, folder.config)
    alone = resolve(EngineConfig(str(tmp_path), device="cpu"), folder.config)
    assert found.parameters == footprint_of(alone, folder.config).parameters

    def held(group: Group) -> int:
        model = load_model(folder, config.context_len, group, torch.float32, expert_parallel=True)
        return sum(parameter.nbytes for name, parameter in model.named_parameters() if "experts" in name)

    most = max(on_ranks(2, held))
    whole = load_model(folder, config.context_len, SoloGroup(), torch.float32)
    experts = sum(parameter.nbytes for name, parameter in whole.named_parameters() if "experts" in name)
    assert most == experts // 2


def test_flags_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"enable_expert_parallel .* use tensor_parallel_size=2"):
        EngineConfig("any", enable_expert_parallel=True)
    make("llama", tmp_path)
    config = EngineConfig(str(tmp_path), device="cpu", tensor_parallel_size=2, enable_expert_parallel=True)
    model = open_model(str(tmp_path)).config
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        check_model(resolve(config, model), model)
