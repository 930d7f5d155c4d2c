"""`--gpu auto`: which GPUs bear a load, and which of them with the least memory."""

from __future__ import annotations

import json

import pytest

from deploy.capacity.choice import choose
from deploy.capacity.gpus import GPUS
from deploy.capacity.load import Wanted
from deploy.capacity.plan import plan_smallest
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from tests.deploy.capacity.shapes import LLAMA_8B, MODELS


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def chosen(wanted, *names, model="llama-8b", per_node=None, **how):
    gpus = [GPUS[name].on_nodes(per_node) for name in names or GPUS]
    return choose(EngineConfig("model", max_model_len=16384), ModelConfig.of(MODELS[model]), wanted, gpus, **how)


def test_the_least_memory_comes_first_and_all_kinds_are_compared(folder):
    plan = plan_smallest(EngineConfig(folder, max_model_len=16384), Wanted(rps=5, tpot=0.05))
    costs = [each.cost for each in plan.candidates]
    assert costs == sorted(costs) and len(costs) > 10
    for each in plan.candidates:
        assert each.cost == each.gpus * each.fit.gpu.memory
        assert each.service.peak.tpot <= 0.05
    assert plan.fit.gpu == plan.candidates[0].fit.gpu
    assert "by GB of GPU memory" in plan.lines()[0]
    assert any(f"{len(costs) - 5} more kinds bear it with more memory" in line for line in plan.lines())


def test_without_a_rate_memory_for_tokens_is_compared(folder):
    plan = plan_smallest(EngineConfig(folder, max_model_len=16384), Wanted())
    best = plan.candidates[0]
    tokens = best.service.peak.rps * 256
    assert best.cost == pytest.approx(best.ranks * best.fit.gpu.memory / tokens * 1000)
    assert plan.lines()[0].endswith("by GB of GPU memory for 1,000 output tokens/s")


def test_ranks_that_were_asked_for_are_the_only_ones_and_none_go_over_a_network():
    found = chosen(Wanted(rps=5), ranks=(2,))
    assert {each.ranks for each in found} == {2}
    assert "GH200" not in {each.fit.gpu.name for each in found}
    assert "GH200" in {each.fit.gpu.name for each in chosen(Wanted(rps=5), ranks=(1,))}


def test_a_load_that_none_bears_is_refused_with_why():
    with pytest.raises(ConfigError, match="on B300: ttft=1e-06 s cannot be met") as refused:
        chosen(Wanted(ttft=1e-6), "L4", "B300")
    assert refused.value.flag == "gpu"
    with pytest.raises(ConfigError, match=r"on L4: of each L4 the weights take 131\.4 GiB"):
        chosen(Wanted(), "L4", model="llama-70b", ranks=(1,))


def test_groups_over_several_nodes_are_not_tried():
    by_node = {count: chosen(Wanted(), "H100", model="llama-70b", per_node=count) for count in (2, None)}
    assert by_node[2][0].ranks == 2
    assert by_node[None][0].ranks >= 2
    with pytest.raises(ConfigError, match="no GPU that is compared bears it"):
        chosen(Wanted(), "L4", model="llama-70b", per_node=1)
