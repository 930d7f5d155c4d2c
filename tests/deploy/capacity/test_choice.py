"""`--gpu auto`: which GPUs bear a load, and which of them cost the least."""

from __future__ import annotations

import json

import pytest

from deploy.capacity.choice import NO_PRICES, Prices, choose
from deploy.capacity.gpus import GPUS
from deploy.capacity.load import Wanted
from deploy.capacity.plan import plan_capacity, plan_cheapest
from deploy.main import explain
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from tests.deploy.capacity.shapes import LLAMA_8B, MODELS

PRICES = Prices.parse("H100=2.5, l4=0.7,nvidia-a100-sxm4-80gb=1.5")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def chosen(wanted, prices=PRICES, model="llama-8b", **how):
    return choose(EngineConfig("model", max_model_len=16384), ModelConfig.of(MODELS[model]), wanted, prices, **how)


def test_prices_are_read_by_any_usual_name():
    assert PRICES.hourly == {"H100": 2.5, "L4": 0.7, "A100-80GB": 1.5}
    assert Prices.parse(None) == NO_PRICES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H100", "'H100' is no price; write H100=2.5,L4=0.7"),
        ("H100=2.5,", "'' is no price"),
        ("H100=free", "'free' of H100 must be a number above 0"),
        ("H100=0", "must be a number above 0"),
        ("H100=inf", "must be a number above 0"),
        ("H100=2,nvidia-h100-80gb-hbm3=3", "H100 has two prices, 2 and 3; leave one"),
        ("H10=2", "--gpu-prices: 'H10' is not known; did you mean"),
    ],
)
def test_prices_that_are_none_are_refused(text, words):
    with pytest.raises(ConfigError) as refused:
        Prices.parse(text)
    assert refused.value.flag == "gpu_prices"
    assert words in explain(refused.value)


def test_the_cheapest_by_price_comes_first_and_others_are_not_compared():
    found = chosen(Wanted(rps=30, tpot=0.05))
    assert {each.fit.gpu.name for each in found} == {"H100", "A100-80GB", "L4"}
    costs = [each.cost for each in found]
    assert costs == sorted(costs)
    for each in found:
        assert each.cost == pytest.approx(each.gpus * PRICES.hourly[each.fit.gpu.name])
        assert each.service.peak.tpot <= 0.05


def test_other_prices_choose_another_one():
    wanted = Wanted(rps=30, tpot=0.05)
    assert chosen(wanted, ranks=(1, 4))[0].fit.gpu.name == "H100"
    assert chosen(wanted, Prices.parse("H100=25,L4=0.1"), ranks=(1, 4))[0].fit.gpu.name == "L4"


def test_without_prices_memory_is_compared_and_that_is_told(folder):
    config, wanted = EngineConfig(folder, max_model_len=16384), Wanted(rps=5)
    plan = plan_cheapest(config, wanted, NO_PRICES)
    best = plan.candidates[0]
    assert best.cost == best.gpus * best.fit.gpu.memory
    assert plan.cost is None
    assert "by GB of GPU memory" in plan.lines()[0]
    assert len(plan.candidates) > 10
    assert any("more kinds bear it" in line for line in plan.lines())


def test_without_a_rate_what_tokens_cost_is_compared(folder):
    plan = plan_cheapest(EngineConfig(folder, max_model_len=16384), Wanted(), PRICES)
    best = plan.candidates[0]
    per_hour = 3600 * best.service.peak.rps * 256
    assert plan.cost == pytest.approx(best.ranks * PRICES.hourly[best.fit.gpu.name] / per_hour * 1e6)
    assert plan.public()["cost"]["measure"] == "price of a million output tokens"


def test_ranks_that_were_asked_for_are_the_only_ones_and_none_go_over_a_network():
    found = chosen(Wanted(rps=5), NO_PRICES, ranks=(2,))
    assert {each.ranks for each in found} == {2}
    assert "GH200" not in {each.fit.gpu.name for each in found}
    assert "GH200" in {each.fit.gpu.name for each in chosen(Wanted(rps=5), NO_PRICES, ranks=(1,))}


def test_a_load_that_none_bears_is_refused_with_why():
    with pytest.raises(ConfigError, match="on B300: ttft=1e-06 s cannot be met") as refused:
        chosen(Wanted(ttft=1e-6), Prices.parse("L4=1,B300=5"))
    assert refused.value.flag == "gpu"
    with pytest.raises(ConfigError, match=r"on L4: of each L4 the weights take 131\.4 GiB"):
        chosen(Wanted(), Prices.parse("L4=1"), "llama-70b", ranks=(1,))


def test_a_fixed_gpu_says_what_it_costs_and_wants_its_price(folder):
    config = EngineConfig(folder, max_model_len=16384)
    plan = plan_capacity(config, "H100", Wanted(rps=5), PRICES)
    assert plan.cost == plan.service.replicas * 2.5
    assert any("price an hour" in line and "5.00" in line for line in plan.lines())
    with pytest.raises(ConfigError, match=r"there is none of H200; add H200=") as refused:
        plan_capacity(config, "H200", Wanted(rps=5), PRICES)
    assert refused.value.flag == "gpu_prices"


def test_every_kind_can_be_compared():
    assert {gpu.name for gpu in NO_PRICES.gpus} == set(GPUS)


def test_groups_over_several_nodes_are_not_tried():
    by_node = {count: chosen(Wanted(), Prices({"H100": 2.0}, count), model="llama-70b") for count in (2, None)}
    assert by_node[2][0].ranks == 2
    assert by_node[None][0].ranks >= 2
    with pytest.raises(ConfigError, match="no GPU that is compared bears it"):
        chosen(Wanted(), Prices({"L4": 0.7}, 1), model="llama-70b")
