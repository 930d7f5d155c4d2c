"""What passes over the device meta find out: attention written out, counted positions, contents asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaAttention

from engine.errors import CheckpointError
from engine.kernels.base import TorchKernels
from engine.models.blueprint import blueprint
from engine.models.transformers.attention import Step
from engine.models.transformers.entered import Entered
from engine.models.transformers.positions import Counted, counted, tell
from engine.models.transformers.shapes import ShapesAlone
from engine.models.transformers.written_out import WrittenOut
from tests.parity.census import model_config

HEADS, TOKENS, WIDTH = 2, 5, 8


def attended(write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return what attention gives that `write` writes out, and what it gives by itself, without a mask."""
    query, key, value = torch.randn(3, 1, HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))

    def attend(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2)

    plain = write(query, key, value)
    with WrittenOut(nn.Identity, attend):
        return write(query, key, value), plain


def four_dimensions(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).float() / math.sqrt(WIDTH)
    return F.dropout(F.softmax(scores, dim=-1), 0.1, training=False) @ value


def three_dimensions(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.bmm(query[0], key[0].transpose(1, 2)) * 0.3
    weights = nn.Softmax(dim=-1)(scores.view(1, HEADS, TOKENS, TOKENS)).view(HEADS, TOKENS, TOKENS)
    return torch.bmm(weights, value[0])


def added_to_zeros(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    nothing = torch.zeros(HEADS, TOKENS, TOKENS)
    scores = torch.baddbmm(nothing, query[0], key[0].transpose(1, 2), beta=1.0, alpha=0.3)
    return torch.matmul(torch.softmax(scores.view(1, HEADS, TOKENS, TOKENS), -1), value)


@pytest.mark.parametrize("write", [four_dimensions, three_dimensions, added_to_zeros])
def test_attention_that_is_written_out_is_found(write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    found, plain = attended(write)
    torch.testing.assert_close(found, plain)


def with_scores(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda query, key, value: change(query @ key.transpose(-1, -2)) @ value


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a bias": (lambda scores: F.softmax(scores + torch.ones(TOKENS), -1), "a mask or a bias"),
    "a factor for each": (lambda scores: F.softmax(scores * torch.ones(TOKENS), -1), "a product with a tensor"),
    "a mask of its own": (lambda scores: F.softmax(torch.where(torch.ones(1) > 0, scores, 0.0), -1), "where"),
    "no softmax": (lambda scores: scores, "a product without a softmax"),
    "weights that are scaled": (lambda scores: F.softmax(scores, -1) * 2, "a product with a tensor"),
    "a softmax over the queries": (lambda scores: F.softmax(scores, -2), "softmax"),
    "dropout": (lambda scores: F.dropout(F.softmax(scores, -1), 0.1, training=True), "dropout"),
    "a cap": (lambda scores: F.softmax(torch.tanh(scores), -1), "tanh"),
    "queries and keys that change places": (lambda scores: F.softmax(scores.transpose(-1, -2), -1), "transpose"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_written_out_otherwise_is_refused(change: str) -> None:
    write, reason = REFUSED[change]
    with pytest.raises(CheckpointError, match=f"writes out has {reason}"):
        attended(with_scores(write))


class Places(nn.Module):
    """A model of nothing but positions. find: returns them, of ids and of what it was told."""

    def __init__(self, find: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        super().__init__()
        self.table, self.find = nn.Embedding(32, 4), find

    def forward(self, ids: Tensor, told: Tensor | None) -> Tensor:
        return self.table(self.find(ids, told))


def counting(ids: Tensor) -> Tensor:
    return torch.arange(len(ids), device=ids.device)


def found(model: Places) -> list[Counted]:
    with torch.device("meta"):
        return counted(model, Entered(model), model, token=1)


def test_positions_that_a_model_is_told_are_left_alone() -> None:
    with torch.device("meta"):
        model = Places(lambda ids, told: (counting(ids) if told is None else told) + 2)
    assert found(model) == []


def test_positions_that_a_model_counts_are_found_and_replaced() -> None:
    with torch.device("meta"):
        model = Places(lambda ids, _: counting(ids)[None] + 2)
    assert found(model) == [Counted("table", 2, 2)]
    served = Places(lambda ids, _: counting(ids)[None] + 2)
    positions = torch.tensor([7, 0, 1])
    tell(served, [Counted("table", 2, 2)], lambda: positions)
    assert torch.equal(served(torch.zeros(3, dtype=torch.long), None), served.table.weight[positions + 2][None])


@pytest.mark.parametrize(
    "find",
    [
        lambda ids, told: counting(ids) + 2 if told is None else told,
        lambda ids, told: (counting(ids) if told is None else told) * 2 + (told is not None),
        lambda ids, _: counting(ids) * 2,
    ],
    ids=["as RoBERTa", "told others", "counted otherwise"],
)
def test_other_positions_than_a_model_is_told_are_refused(
    find: Callable[[Tensor, Tensor | None], Tensor],
) -> None:
    with torch.device("meta"):
        model = Places(find)
    with pytest.raises(CheckpointError, match="other positions than those it is told"):
        found(model)


class Turned(nn.Module):
    """Angles of positions, of which one part is used, as of a rotation."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.counts = counts

    def forward(self, ids: Tensor, told: Tensor | None) -> Tensor:
        places = counting(ids) if told is None or self.counts else told
        first, _ = (places[:, None] * torch.arange(1.0, 5.0, device=ids.device)).chunk(2, dim=-1)
        return self.weight * first.cos()


def test_positions_are_followed_through_parts() -> None:
    with torch.device("meta"):
        assert found(Turned(counts=False)) == []
        with pytest.raises(CheckpointError, match="other positions than those it is told"):
            found(Turned(counts=True))


class Sliced(nn.Module):
    """A table of which as many rows are taken as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(40, 4))

    def forward(self, ids: Tensor, told: Tensor | None) -> Tensor:
        return self.table[: len(ids)]


def test_rows_by_the_length_of_a_step_are_refused() -> None:
    with torch.device("meta"), pytest.raises(CheckpointError, match="as many rows of a tensor as a step has tokens"):
        found(Sliced())


class Loop(nn.Module):
    """Experts that are looped over by the contents of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * int(x.sum())


def test_a_loop_over_contents_is_passed_by_and_refused_where_attention_is_inside() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Loop(), nn.Linear(4, 2))
        shapes = ShapesAlone(model)
        assert model(torch.empty(3, 4)).shape == (3, 2)
    shapes.check([model])
    with pytest.raises(CheckpointError, match="Loop asks for the contents of tensors"):
        shapes.check([nn.Linear(1, 1)])


def more_keywords(attention: nn.Module, plain: Callable[..., object], given: dict[str, Any]) -> object:
    return plain(attention, **given, alibi_slopes=torch.ones(4))


def scale_by_length(attention: nn.Module, plain: Callable[..., object], given: dict[str, Any]) -> object:
    attention.scaling = 1 / given["hidden_states"].shape[1]
    return plain(attention, **given)


def twice_in_every_second(attention: nn.Module, plain: Callable[..., object], given: dict[str, Any]) -> object:
    if attention.layer_idx % 2:
        return given["hidden_states"], None
    plain(attention, **given)
    return plain(attention, **given)


def one_head_of_values(attention: nn.Module, plain: Callable[..., object], given: dict[str, Any]) -> object:
    states = torch.zeros(1, 4, given["hidden_states"].shape[1], 16, device="meta")
    attend = AttentionInterface()["squadron_paged"]
    return attend(attention, states, states, states[:, :1], None, scaling=1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (more_keywords, "wants alibi_slopes, which the paged attention does not have"),
        (scale_by_length, "asks for other attention in longer steps"),
        (twice_in_every_second, "attends in 1 of 2 layers"),
        (one_head_of_values, "has 1 heads of values for 4 of keys"),
    ],
)
def test_a_model_that_asks_for_what_the_cache_has_not_is_refused(
    change: Callable[..., object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda attention, **given: change(attention, plain, given))
    with pytest.raises(CheckpointError, match=said):
        blueprint(model_config("llama"))


def test_rotations_of_one_step_are_told_apart_by_cosines_and_sines() -> None:
    step, kernels = Step(), TorchKernels()
    half = torch.randn(2, 1, 3, 4)
    cos, sin = torch.cat((half, half), dim=-1)
    with step.runs(Mock(), torch.arange(3)):
        forth, back = step.rotation(cos, sin, kernels), step.rotation(cos, -sin, kernels)
        assert step.rotation(cos, sin, kernels) is forth
        torch.testing.assert_close(back[1], -forth[1])
