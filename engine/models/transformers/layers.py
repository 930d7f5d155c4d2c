"""Our layers in the place of those of a model of transformers, split over the ranks by the model's own `tp_plan`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from typing_extensions import override

from engine.errors import CheckpointError
from engine.layers.base import Build, Stacked, StackedConv1D
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.mlp import Gate
from engine.layers.moe import Experts
from engine.models.transformers.recognised import Replaced, is_silu_gate, put, recognise
from parallel.linear import MergedColumnParallelLinear, ParallelLinear, RowParallelLinear
from parallel.parameter import ShardedParameter, replicated
from parallel.sharding import Piece, even_pieces

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Styles of `tp_plan` by what they mean where no gradients flow.
WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
COLUMNS = ("colwise", "packed_colwise")
GATHERED = ("colwise_gather_output", "colwise_rep")
ROWS = ("rowwise",)
SPLIT = ("rowwise_split_input", "rowwise_rep")
ROWS_AT_ONCE = 64
# Linear layers that choose experts, or weigh what they return: never quantised.
ROUTERS = ("gate", "router", "shared_expert_gate", "classifier", "wg")


class Linear(MergedColumnParallelLinear):
    """Rows of the weight split over the ranks, for inputs of any shape before the features.

    gathered: whether the outputs of all ranks are put together.
    """

    def __init__(self, old: nn.Linear, parts: int, gathered: bool, build: Build) -> None:
        sizes = [old.out_features // parts] * parts
        super().__init__(old.in_features, sizes, old.bias is not None, build.group, build.dtype)
        self.in_features, self.out_features = old.in_features, old.out_features
        self._gathered = gathered

    @override
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x.flatten(0, -2))
        return (self.group.all_gather(out) if self._gathered else out).unflatten(0, x.shape[:-1])


class WholeLinear(ParallelLinear):
    """A weight that every rank holds whole, for inputs of any shape before the features."""

    def __init__(self, old: nn.Linear, build: Build) -> None:
        device = build.group.device
        bias = None if old.bias is None else replicated((old.out_features,), build.dtype, device)
        super().__init__(replicated((old.out_features, old.in_features), build.dtype, device), bias, build.group)
        self.in_features, self.out_features = old.in_features, old.out_features

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class InputSplitLinear(RowParallelLinear):
    """Columns of the weight split over the ranks, for inputs of any shape before the features.

    whole: whether the input comes whole, and this rank takes its share of it.
    """

    def __init__(self, old: nn.Linear, whole: bool, build: Build) -> None:
        super().__init__(old.in_features, old.out_features, old.bias is not None, build.group, build.dtype)
        self.in_features, self.out_features = old.in_features, old.out_features
        self._whole = whole

    @override
    def forward(self, x: Tensor) -> Tensor:
        own = x.chunk(self.group.size, dim=-1)[self.group.rank] if self._whole else x
        return super().forward(own.flatten(0, -2)).unflatten(0, x.shape[:-1])


class Head(ParallelLMHead):
    """The output head as transformers' `forward` calls it: this rank's share of the logits."""

    def __init__(self, old: nn.Linear, build: Build) -> None:
        super().__init__(old.in_features, old.out_features, old.bias is not None, build.group, build.dtype)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.own(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class ParallelEmbedding(nn.Module):
    """An embedding of transformers, whatever it does beside looking up, over this rank's rows of the table."""

    def __init__(self, inner: nn.Embedding, build: Build) -> None:
        super().__init__()
        table = VocabParallelEmbedding(inner.num_embeddings, inner.embedding_dim, build.group, build.dtype)
        self.vocab_size = table.vocab_size
        self._gather = table.gather
        inner.padding_idx = None  # it is for gradients alone
        inner.weight = table.weight
        self.inner = inner

    @property
    def weight(self) -> ShardedParameter:
        """This rank's rows of the table."""
        return self.inner.weight  # type: ignore[return-value]

    @override
    def forward(self, ids: Tensor) -> Tensor:
        return self._gather(ids, self.inner)


class StackedExperts(Experts):
    """Experts as transformers calls them, whose weights a checkpoint holds stacked; see its `ExpertsInterface`.

    old: decorated with `use_experts_implementation`, which says how its weights lie.
    """

    def __init__(self, old: Any, build: Build) -> None:
        first = "gate_up_proj" if old.has_gate else "up_proj"
        stacked, down = getattr(old, first), old.down_proj
        count, up, hidden = stacked.shape if not old.is_transposed else (len(stacked), *stacked.shape[:0:-1])
        width = down.shape[1] if old.is_transposed else down.shape[2]
        # Gate and up one after the other are split each by itself; interleaved ones lie side by side.
        inner = [up // 2, up // 2] if old.has_gate and old.is_concatenated else [up]
        activate = old._apply_gate if old.has_gate else old.act_fn
        if len(inner) == 2 and is_silu_gate(activate):
            activate = Gate("silu")
        super().__init__(count, hidden, inner, width, activate, build, bias=old.has_bias)
        self.transposed = bool(old.is_transposed)
        self.stored_as = {"up": first, "down": "down_proj"}

    def names(self, prefix: str) -> Iterator[tuple[str, Stacked]]:
        """Yield the linear layers, with what a checkpoint calls their weights. prefix: what it calls this."""
        kind = StackedConv1D if self.transposed else Stacked
        for way, name in self.stored_as.items():
            for number in self.own:
                yield f"{way}.{number}", kind(f"{prefix}.{name}")


class _FixedRows(TorchFunctionMode):
    """Multiplies by plain weights in products of one number of rows, so that no row's bits depend on its company."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear or kwargs or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        x, *weights = args
        pieces = x.flatten(0, -2).split(ROWS_AT_ONCE)
        products = [func(F.pad(rows, (0, 0, 0, ROWS_AT_ONCE - len(rows))), *weights)[: len(rows)] for rows in pieces]
        return torch.cat(products).unflatten(0, x.shape[:-1])


def _fix_rows(module: nn.Module) -> None:
    """Have a module with its own weight, such as a router of experts, multiply by it in fixed numbers of rows."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _FixedRows():
            return plain(*args, **kwargs)

    module.forward = forward


def parallelise(
    model: PreTrainedModel, build: Build, uncalled: Collection[str] = ()
) -> tuple[ParallelEmbedding, Head, Replaced]:
    """Put our layers in the place of `model`'s, which is on the device meta; return embedding, head and what else.

    uncalled: paths of linear layers whose weights the model may read itself, which ours do not hold as they were.
    Raises `CheckpointError` where the model has no plan for so many ranks, `ShardingError` for sizes that cannot be
    split.
    """
    plan: Mapping[str, str] = model.tp_plan or {}
    if build.group.size > 1 and not plan:
        raise CheckpointError(
            f"config.json: transformers has no tensor-parallel plan for {type(model).__name__}; "
            "use tensor_parallel_size=1"
        )
    old_embedding, old_head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(old_embedding, nn.Embedding) or not isinstance(old_head, nn.Linear):
        raise CheckpointError(f"config.json: {type(model).__name__} has no embedding or no head that is one matrix")
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    wide = _wide_dtypes(model, build.dtype)

    def style(path: str) -> str:
        found = _style(plan, path) if build.group.size > 1 else "replicate"
        return "replicate" if found in WHOLE else found

    replaced = recognise(model, style, wide, build)
    embedding = ParallelEmbedding(old_embedding, build)
    head = Head(old_head, build)
    for path, module in list(model.named_modules()):
        if module is old_embedding:
            put(model, path, embedding)
        elif module is old_head:
            put(model, path, head)
        elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and path not in uncalled:
            own = replace(build, dtype=wide.get(f"{path}.weight", build.dtype))
            made = _linear(module, path, plan, own)
            made.quantized = own.dtype is build.dtype and path.rpartition(".")[2] not in ROUTERS
            put(model, path, made)
        elif hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            put(model, path, _experts(module, build))
    _own_parameters(model, plan, wide, build)
    if tied:
        head.tie_to(embedding)  # type: ignore[arg-type]
    return embedding, head, replaced


def _linear(old: nn.Linear, path: str, plan: Mapping[str, str], build: Build) -> ParallelLinear:
    style = _style(plan, path) if build.group.size > 1 else "replicate"
    if style in WHOLE:
        return WholeLinear(old, build)
    if style in COLUMNS or style in GATHERED:
        return Linear(old, 2 if style == "packed_colwise" else 1, style in GATHERED, build)
    if style in ROWS or style in SPLIT:
        return InputSplitLinear(old, style in SPLIT, build)
    raise CheckpointError(
        f"config.json: {path} is split as {style!r}, which this backend does not know; use tensor_parallel_size=1"
    )


def _experts(old: Any, build: Build) -> StackedExperts:
    if getattr(old, "has_post_expert_norm", False):
        raise CheckpointError("config.json: experts with a norm after each are not supported")
    return StackedExperts(old, build)


def _wide_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of what a model of `dtype` keeps in another one, such as the biases of routers, by path."""
    kept: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    if not kept:
        return {}
    pattern, names, _ = build_glob_alternation(list(kept))
    found = ((path, pattern.search(path)) for path in model.state_dict())
    return {path: kept[names[match.lastgroup]] for path, match in found if match is not None}


def _own_parameters(model: nn.Module, plan: Mapping[str, str], wide: Mapping[str, torch.dtype], build: Build) -> None:
    """Let the parameters and the stored buffers that are left know how they are loaded."""
    group = build.group
    for path, module in model.named_modules():
        stored = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        for name, buffer in stored.items():
            if name not in module._non_persistent_buffers_set:
                del module._buffers[name]
                dtype = wide.get(f"{path}.{name}", buffer.dtype)
                module.register_parameter(name, replicated(buffer.shape, dtype, group.device))
        for name, old in list(module._parameters.items()):
            if old is None or isinstance(old, ShardedParameter):
                continue
            if name == "weight" and old.ndim == 2 and not isinstance(module, nn.Embedding):
                _fix_rows(module)
            style = _style(plan, f"{path}.{name}") if group.size > 1 else "replicate"
            shape = list(old.shape)
            pieces: tuple[Piece, ...] = ()
            if style not in (*WHOLE, "colwise"):
                raise CheckpointError(
                    f"config.json: {path}.{name} is split as {style!r}, which this backend does not know; use "
                    "tensor_parallel_size=1"
                )
            if style == "colwise":
                pieces = even_pieces([shape[0]], group.rank, group.size, name)
                shape[0] = pieces[0].size
            dtype = wide.get(f"{path}.{name}", old.dtype)
            module._parameters[name] = ShardedParameter.of(shape, dtype, group.device, 0 if pieces else None, pieces)


def _style(plan: Mapping[str, str], path: str) -> str:
    """Return how a module or parameter is split over the ranks; "replicate" where the plan does not name it."""
    return plan.get(path) or plan.get(NUMBER.sub("*", path)) or "replicate"
