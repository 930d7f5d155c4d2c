"""What one rank of a model takes, without a weight, a GPU or the memory: the engine's own decoder on torch's device
`meta`, whose tensors have shapes and no contents. So the sizes are those of the code that runs, not of a formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionBackend, AttentionContext, LayerCache, StepTensors
from engine.attention.choice import attention_spec
from engine.attention.flash import unfit_for_flash
from engine.attention.triton_fit import unfit_for_triton
from engine.config import EngineConfig
from engine.device.live_bytes import LiveBytes
from engine.inputs.step_tensors import dummy_step
from engine.kv.cache import block_bytes
from engine.loader.model_folder import check_sharding
from engine.models.decoder import Attention, Decoder
from engine.models.registry import ARCHITECTURES
from engine.models.spec import DecoderSpec
from engine.quantization.layers import Layout, quantization_of
from engine.sampling.sampler import score
from engine.sampling_params import MAX_LOGPROBS
from engine.worker.forward import logit_rows
from engine.worker.graph_sizes import graph_sizes, mixed_sizes
from parallel.fp8 import E4M3
from parallel.group import Group
from parallel.linear import ParallelLinear
from parallel.tuning import choose_quantised

META = torch.device("meta")
LAYERS_RUN = 2  # all layers of a decoder take as much; the second has what the first one leaves behind
# Bytes beside each logit that is drawn from, where top-p looks at whole rows and log-probabilities are told, as
# tests/engine/worker/test_footprint.py measures.
SAMPLER_BYTES = 44


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of the rank that holds most.

    parameters: of the whole model, over all ranks. weight_bytes: weights and tables. step_bytes: most that a step of
    `max_num_batched_tokens` prompt tokens and `max_num_seqs` sequences holds beside them, as eager torch runs it.
    graph_bytes: what CUDA graphs hold of their own.
    layer_products, head_products: weights that a token is multiplied by in the layers, and for its logits.
    read_bytes: weights that a step reads; an embedding's rows are looked up, not read.
    num_heads, num_kv_heads: of this rank. block_bytes: of one KV block. no_attention: why no attention made for GPUs
    takes this model so, None where one does.
    """

    parameters: int
    weight_bytes: int
    step_bytes: int
    graph_bytes: int
    layer_products: int
    head_products: int
    read_bytes: int
    num_heads: int
    num_kv_heads: int
    block_bytes: int
    no_attention: str | None


def footprint_of(config: EngineConfig, spec: DecoderSpec) -> Footprint:
    """Return the sizes of a model. config: resolved (dtype, max_model_len). Raises `ShardingError`."""
    check_sharding(spec, config.tensor_parallel_size)
    decoder = build_blueprint(config, spec)
    attention = attention_spec(config, spec, decoder.attention_heads, META)
    heads, kv_heads = decoder.attention_heads
    weights = sum(weight.nbytes for weight in decoder.parameters())
    inside = [part.weight for part in decoder.layers.modules() if isinstance(part, ParallelLinear)]
    no_attention = unfit_for_flash(attention) and unfit_for_triton(attention)
    lookup = 0 if spec.tied_embeddings else decoder.embedding.weight.nbytes
    return Footprint(
        parameters=sum(math.prod(rule.shape) for rule in ARCHITECTURES[spec.architecture].weights(spec)),
        weight_bytes=weights + _table_bytes(decoder),
        step_bytes=step_bytes(config, spec),
        graph_bytes=0 if no_attention else graph_bytes(config, spec),
        layer_products=sum(weight.numel() for weight in inside),
        head_products=decoder.head.weight.numel(),
        read_bytes=weights - lookup,
        num_heads=heads,
        num_kv_heads=kv_heads,
        block_bytes=block_bytes(spec.num_layers, config.block_size, kv_heads, spec.head_dim, attention.cache_dtype),
        no_attention=no_attention,
    )


def build_blueprint(config: EngineConfig, spec: DecoderSpec) -> Decoder:
    """Return rank 0's decoder on `meta`. config: resolved."""
    with META:
        group = BlueprintGroup(config.tensor_parallel_size)
        layout = Layout(quantization_of(config, spec), ARCHITECTURES[spec.architecture].weights(spec))
        decoder = Decoder(spec, config.context_len, group, getattr(torch, config.dtype), layout.outline)
        decoder.finish_loading()
        choose_quantised(decoder, lambda weight, scale: None, _quantised_rows)
    return decoder.requires_grad_(False).eval()


def step_bytes(config: EngineConfig, spec: DecoderSpec) -> int:
    """Return the most bytes of activations and logits at one time in the warm-up step of a GPU. config: resolved."""
    decoder = _short_blueprint(config, spec)
    step = dummy_step(config.max_num_batched_tokens, config.max_num_seqs, config.context_len, config.block_size)
    rows = len(step.logits_indices)
    drawn = rows * spec.vocab_size * (4 + SAMPLER_BYTES)
    piece = min(logit_rows(config, spec.vocab_size), step.num_tokens)
    scored = rows * spec.vocab_size * 4 + _scored_bytes(decoder, _hidden(config, spec, piece))
    return max(_layers_bytes(decoder, config, spec, step.num_tokens), drawn, scored)


def _scored_bytes(decoder: Decoder, hidden: Tensor) -> int:
    """Return the most bytes at one time while the log-probabilities of a piece of a prompt are read."""
    tokens = torch.zeros(len(hidden), dtype=torch.int64, device=META)
    with torch.inference_mode(), LiveBytes() as seen:
        score(decoder.logits(hidden), tokens, MAX_LOGPROBS, ranked=True)
    return seen.peak


def graph_bytes(config: EngineConfig, spec: DecoderSpec) -> int:
    """Return the bytes of what CUDA graphs compute in and of their logits. config: resolved.

    All graphs share the memory of the largest. What the driver takes for each is not in it.
    """
    decodes, mixed = graph_sizes(config).largest, mixed_sizes(config).largest
    if not decodes:
        return 0
    rows = max(decodes, min(config.max_num_seqs, mixed))
    decoder = _short_blueprint(config, spec)
    hidden = _hidden(config, spec, rows)
    kept = torch.empty(rows, decoder.head.share, dtype=decoder.logits_dtype, device=META)
    with torch.inference_mode(), LiveBytes() as logits:
        decoder.own_logits(hidden, out=kept)
    states = _hidden(config, spec, mixed).nbytes
    return kept.nbytes + states + max(_layers_bytes(decoder, config, spec, max(decodes, mixed)), logits.peak)


def _short_blueprint(config: EngineConfig, spec: DecoderSpec) -> Decoder:
    layers = min(spec.num_layers, LAYERS_RUN)
    return build_blueprint(config, replace(spec, num_layers=layers, sliding_windows=spec.sliding_windows[:layers]))


def _hidden(config: EngineConfig, spec: DecoderSpec, rows: int) -> Tensor:
    return torch.empty(rows, spec.hidden_size, dtype=getattr(torch, config.dtype), device=META)


def _layers_bytes(decoder: Decoder, config: EngineConfig, spec: DecoderSpec, num_tokens: int) -> int:
    """Return the most bytes at one time inside the layers of a decoder."""
    with META, torch.inference_mode():
        ids = torch.empty(num_tokens, dtype=torch.int32)
        empty = torch.empty(0)
        backend = BlueprintAttention(attention_spec(config, spec, decoder.attention_heads, META))
        context = AttentionContext(backend, None, (LayerCache(empty, empty),) * len(decoder.layers))
        with LiveBytes() as inside:
            decoder(ids, ids, context)
    return inside.peak


class BlueprintGroup(Group):
    """Rank 0 of a group whose other ranks are nowhere: tensors keep or get the shapes that they have in a group."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size
        self.device = META

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x if self.size == 1 else torch.cat([x] * self.size, dim)

    @override
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        return x

    @override
    def barrier(self) -> None:
        """There is nobody to wait for."""

    @override
    def close(self) -> None:
        """There is nothing to free."""


class BlueprintAttention(AttentionBackend):
    """Attention that makes its result's tensor and nothing else, as kernels without scratch memory do."""

    name = "blueprint"

    @override
    def prepare(self, step: StepTensors) -> NoReturn:
        raise RuntimeError("a blueprint attends to no step")

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: object,
        window: int,
    ) -> Tensor:
        return query.new_empty(query.shape)


def _quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Make what a GPU's kernel makes of rows of activations, and nothing else."""
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32)


def _table_bytes(decoder: Decoder) -> int:
    """Return the bytes of what is made beside the weights: angles of positions, norms laid out per head."""
    norms = [part.head_norms for part in decoder.modules() if isinstance(part, Attention)]
    angles = 0 if decoder.rotary is None else decoder.rotary.table.nbytes
    return angles + sum(norm.nbytes for norm in norms if norm is not None)
