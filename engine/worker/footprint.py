"""The memory that one rank of a model takes, computed without weights or a GPU.

The engine's own model is built on torch's device `meta`, whose tensors have shapes and no contents, so that the sizes
are those of the code that runs, not of a formula.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from engine.attention.base import (
    AttentionContext,
    AttentionSpec,
    LayerCache,
    UnlikeLayers,
)
from engine.attention.triton_fit import unfit_for_triton
from engine.attention.varlen import unfit_for_flash
from engine.config import EngineConfig
from engine.inputs.dummy_steps import dummy_step
from engine.kernels.recurrent import StateRows
from engine.kv.cache_specs import RecurrentSpec, block_bytes, state_bytes
from engine.layers.attention import attention_specs
from engine.layers.base import Layer
from engine.layers.mla import HeadProducts
from engine.layers.moe import Experts
from engine.models.blueprint import META, blueprint, outlined
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLM
from engine.quantization.method import QuantizedLinear
from engine.quantization.select import quantization_of, quantize
from engine.sampling.sampler import score
from engine.sampling_params import MAX_LOGPROBS
from engine.worker.forward import logit_rows
from engine.worker.graph_sizes import graph_sizes, mixed_sizes
from engine.worker.meta_kernels import BlueprintAttention, MetaKernels
from engine.worker.step_counts import StepCounts, count_step
from parallel.linear import ParallelLinear, PlainLinear


class LiveBytes(TorchDispatchMode):
    """While entered, notes the storage of each tensor that an operation makes, until it is freed.

    peak: most bytes of them that were alive at one time. What was there before counts only where it is written anew.
    Slow: for measuring, not for serving.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @override
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {leaf.untyped_storage()._cdata for leaf in inputs}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage(), given)
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        """Take a storage in unless it came with the arguments: a view, or what was written in place."""
        if storage._cdata not in given:
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())


COUNTED_TOKENS = 64  # of the step whose launches are counted: with expert parallelism each rank has a share of them
LAYERS_RUN = 2  # of layers that are alike: they take as much, and the second has what the first one leaves behind
# Bytes beside each logit that is drawn from, where top-p looks at whole rows and log-probabilities are given, as
# tests/engine/worker/test_footprint.py measures.
SAMPLER_BYTES = 44


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What one layer's attention costs on one rank.

    window: tokens that a query sees, 0 = all. pair_operations: of one query and one key. token_bytes: of one token in
    the cache.
    """

    window: int
    pair_operations: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """What one layer's experts cost on one rank.

    count: experts of the layer, over all ranks. own: those that the rank holds. top_k: those that a token passes
    through. products, read_bytes: of one expert's part on this rank, the weights that a row is multiplied by, and
    their bytes. in_one_launch: whether all are multiplied in one, rows in the model's dtype.
    """

    count: int
    own: int
    top_k: int
    products: int
    read_bytes: int
    in_one_launch: bool


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of the rank that holds most.

    parameters: of the whole model, over all ranks. weight_bytes: weights and tables. step_bytes: most that a step of
    `max_num_batched_tokens` prompt tokens and `max_num_seqs` sequences holds beside them, as eager torch runs it.
    graph_bytes: what CUDA graphs hold of their own.
    layer_products, head_products: weights of all products in the layers, and for a token's logits.
    grouped_products: of those in the layers, experts' that multiply in one launch.
    read_bytes: weights that a step reads if its tokens pass through all experts; an embedding's rows are looked up.
    experts: of each layer that has some: a token passes through `top_k` of them alone.
    attention: of each layer that attends. block_bytes: of one KV block. state_bytes: of the recurrent state of one
    sequence, 0 where there is none. no_attention: why no attention made for GPUs takes this model so, None where one
    does. counts: what a step launches and sends.
    """

    parameters: int
    weight_bytes: int
    step_bytes: int
    graph_bytes: int
    layer_products: int
    grouped_products: int
    head_products: int
    read_bytes: int
    attention: tuple[AttentionWork, ...]
    block_bytes: int
    state_bytes: int
    no_attention: str | None
    counts: StepCounts
    experts: tuple[ExpertWork, ...] = ()


def footprint_of(config: EngineConfig, model: ModelConfig, parameters: int | None = None) -> Footprint:
    """Return the sizes of a model. config: resolved (dtype, max_model_len). Raises as `check_model` does.

    parameters: of the whole model where they are known; to count them may take as long as all else.
    """
    built = build_blueprint(config, model)
    specs, _ = attention_specs(built.cached, config, META)
    weights = sum(weight.nbytes for weight in built.parameters())
    grouped = sum(
        _products(part) for part in built.layers.modules() if isinstance(part, Experts) and part.grouped is not None
    )
    no_attention = next((why for spec in specs if (why := _why_no_attention(spec))), None)
    lookup = 0 if built.head.weight is built.table else built.table.nbytes
    dtype = specs[0].cache_dtype
    attention = [
        AttentionWork(part.window, part.pair_operations, part.cache_spec(dtype).block_bytes(1))
        for part in built.attention
    ]
    found = Footprint(
        parameters=_parameters(config, model, built) if parameters is None else parameters,
        weight_bytes=weights + _table_bytes(built),
        step_bytes=0,
        graph_bytes=0,
        layer_products=_products(built.layers),
        grouped_products=grouped,
        head_products=built.head.weight.numel(),
        read_bytes=weights - lookup,
        attention=tuple(attention),
        block_bytes=block_bytes(built.cache_specs(dtype), config.block_size),
        state_bytes=state_bytes(built.cache_specs(dtype)),
        no_attention=no_attention,
        counts=StepCounts(),
    )
    times = _shorten(built)
    graphs = 0 if no_attention or not built.supports_graphs else graph_bytes(config, built)
    found = replace(found, step_bytes=step_bytes(config, built), graph_bytes=graphs)
    experts = [
        (times.get(layer, 1), _expert_work(part), _noted_choice(part))  # before their layers are made to count
        for layer in built.layers.children()
        for part in layer.modules()
        if isinstance(part, Experts)
    ]
    found = replace(found, counts=_step_counts(config, built, times))
    work = [replace(each, top_k=max(chosen)) for count, each, chosen in experts for _ in range(count)]
    return replace(found, experts=tuple(work))


def _products(layers: nn.Module) -> int:
    """Return the weights of all products inside `layers`."""
    return sum(
        part.weight.numel() * (part.method.numbers if isinstance(part, ParallelLinear) else 1)
        for part in layers.modules()
        if isinstance(part, ParallelLinear | HeadProducts)
    )


def _expert_work(part: Experts) -> ExpertWork:
    """Return what a layer's experts cost, but for `top_k`, which the router knows."""
    first = str(part.own.start)
    one = (part.up[first], part.down[first])
    held = sum(weight.nbytes for layer in one for weight in layer.parameters())
    return ExpertWork(part.count, len(part.own), 0, sum(map(_products, one)), held, part.grouped is not None)


def _noted_choice(part: Experts) -> list[int]:
    """Return where it is noted, as a step runs, how many experts each token was sent through."""
    seen: list[int] = []
    plain = part.part

    def noted(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        seen.append(chosen.shape[1])
        return plain(x, chosen, weights)

    part.part = noted  # type: ignore[method-assign]
    return seen


def _parameters(config: EngineConfig, model: ModelConfig, built: CausalLM) -> int:
    """Return the parameters of all ranks together; with expert parallelism `built` knows rank 0's experts alone."""
    apart = config.enable_expert_parallel or config.quantization is not None
    whole = blueprint(model, 1, config.context_len) if apart else built
    return sum(math.prod(rule.shape) for rule in whole.weights() if not rule.scale)


def _why_no_attention(spec: AttentionSpec) -> str | None:
    """Return why no kernel of a GPU serves these layers, None when one does."""
    ours = unfit_for_triton(spec)
    return ours if spec.sinks or spec.latent else unfit_for_flash(spec) and ours


def build_blueprint(config: EngineConfig, model: ModelConfig) -> CausalLM:
    """Return rank 0's part of a model, its linear layers held as after loading. config: resolved."""
    found = outlined(config, model)
    quantization = quantization_of(config, model.quantization)
    with META:
        quantize(found.layers, found.layers_path, found.names, quantization)
        found.finish_loading()
        kernels = MetaKernels()
        for layer in found.modules():
            if isinstance(layer, ParallelLinear) and isinstance(layer.method, QuantizedLinear):
                layer.method.outline(layer)
                layer.method.use_kernels(layer, kernels, PlainLinear)
            elif isinstance(layer, Layer):
                layer.kernels = kernels
                if isinstance(layer, Experts):
                    layer.use_kernels(kernels)
    return found.requires_grad_(False)


def _shorten(model: CausalLM) -> dict[nn.Module, int]:
    """Leave `LAYERS_RUN` of the layers that are alike, where the layers are ours.

    Returns for how many layers each one stands that is left: the last of a kind for those that are not.
    """
    if not isinstance(model, DecoderLM):
        return {}
    seen: Counter[str] = Counter()
    last: dict[str, nn.Module] = {}
    times: dict[nn.Module, int] = {}
    for layer in model.layers:
        kind = _kind(layer)
        seen[kind] += 1
        if seen[kind] <= LAYERS_RUN:
            times[layer], last[kind] = 1, layer
        else:
            times[last[kind]] += 1
    model.layers = nn.ModuleList(times)
    return times


def _kind(layer: nn.Module) -> str:
    """Return what distinguishes a layer from those that take other memory."""
    shapes = [(name, tuple(weight.shape), weight.dtype) for name, weight in layer.named_parameters()]
    return f"{layer} {shapes}"


def step_bytes(config: EngineConfig, model: CausalLM) -> int:
    """Return the most bytes of activations and logits at one time in the warm-up step of a GPU. config: resolved."""
    step = dummy_step(config.token_budget, config.max_num_seqs, config.context_len, config.block_size)
    rows = len(step.logits_indices)
    drawn = rows * model.vocab_size * (4 + SAMPLER_BYTES)
    piece = min(logit_rows(config, model.vocab_size), step.num_tokens)
    scored = rows * model.vocab_size * 4 + _scored_bytes(model, _hidden(config, model, piece))
    return max(_layers_bytes(model, config, step.num_tokens), drawn, scored)


def _scored_bytes(model: CausalLM, hidden: Tensor) -> int:
    """Return the most bytes at one time while the log-probabilities of a piece of a prompt are read."""
    tokens = torch.zeros(len(hidden), dtype=torch.int64, device=META)
    with torch.inference_mode(), LiveBytes() as seen:
        score(model.logits(hidden), tokens, MAX_LOGPROBS, ranked=True)
    return seen.peak


def graph_bytes(config: EngineConfig, model: CausalLM) -> int:
    """Return the bytes of what CUDA graphs compute in and of their logits. config: resolved.

    All graphs share the memory of the largest. What the driver takes for each is not in it.
    """
    decodes, mixed = graph_sizes(config).largest, mixed_sizes(config).largest
    if not decodes:
        return 0
    rows = max(decodes, min(config.max_num_seqs, mixed))
    hidden = _hidden(config, model, rows)
    kept = torch.empty(rows, model.head.share, dtype=model.logits_dtype, device=META)
    with torch.inference_mode(), LiveBytes() as logits:
        model.own_logits(hidden, out=kept)
    states = _hidden(config, model, mixed).nbytes
    return kept.nbytes + states + max(_layers_bytes(model, config, max(decodes, mixed)), logits.peak)


def _hidden(config: EngineConfig, model: CausalLM, rows: int) -> Tensor:
    return torch.empty(rows, model.hidden_size, dtype=getattr(torch, config.dtype), device=META)


def _step_counts(config: EngineConfig, model: CausalLM, times: Mapping[nn.Module, int]) -> StepCounts:
    """Return what a step launches and sends; the model is of no use afterwards. times: as of `_shorten`."""

    def run() -> None:
        _run_layers(model, config, COUNTED_TOKENS, nullcontext())
        model.own_logits(_hidden(config, model, 1))

    with torch.inference_mode():
        return count_step(model, MetaKernels(), run, COUNTED_TOKENS, times)


def _layers_bytes(model: CausalLM, config: EngineConfig, num_tokens: int) -> int:
    """Return the most bytes at one time inside the layers of a model."""
    inside = LiveBytes()
    _run_layers(model, config, num_tokens, inside)
    return inside.peak


def _run_layers(
    model: CausalLM, config: EngineConfig, num_tokens: int, watch: AbstractContextManager[object]
) -> None:
    """Run a model's layers over so many tokens, in shapes. watch: entered for the layers alone."""
    with META, torch.inference_mode():
        ids = torch.empty(num_tokens, dtype=torch.int32)
        specs, kinds = attention_specs(model.cached, config, META)
        backend = UnlikeLayers([BlueprintAttention(spec) for spec in specs], kinds)
        nowhere = torch.empty(0, dtype=torch.int32)
        context = AttentionContext(
            backend, (None,) * len(specs), _caches(model), StateRows(nowhere, nowhere, nowhere)
        )
        with watch:
            model(ids, ids, context)


def _caches(model: CausalLM) -> tuple[LayerCache | tuple[Tensor, ...], ...]:
    """Return what each layer would get as its cache, on torch's device `meta`: one state, no block."""
    empty = torch.empty(0, device=META)
    return tuple(
        tuple(torch.empty(1, *shape, dtype=spec.dtype, device=META) for shape in spec.state)
        if isinstance(spec, RecurrentSpec)
        else LayerCache(empty, empty)
        for spec in model.cache_specs(torch.float32)
    )


def _table_bytes(model: CausalLM) -> int:
    """Return the bytes of what is made beside the weights: angles of positions, norms laid out per head."""
    found = (value for part in model.modules() for value in vars(part).values())
    return sum(value.nbytes for value in found if isinstance(value, Tensor))
