"""Names and shapes of the tensors in a checkpoint, and which parameter of the decoder each of them fills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class WeightRule:
    """One tensor of a checkpoint.

    name: in the checkpoint. target: the decoder's parameter. part: the piece of a merged parameter, None = all of it.
    shape: on disk. transposed: stored as [in, out], as GPT-2's Conv1D does. packed: four bytes in an int32.
    """

    name: str
    target: str
    shape: tuple[int, ...]
    part: str | int | None = None
    transposed: bool = False
    packed: bool = False


def llama_weights(spec: DecoderSpec) -> Iterator[WeightRule]:
    """Yield the tensors of a Llama, Mistral, Qwen2 or Qwen3 checkpoint."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield WeightRule("model.embed_tokens.weight", "embedding.weight", (vocab, hidden))
    for layer in range(spec.num_layers):
        yield from _llama_layer(spec, f"model.layers.{layer}.", f"layers.{layer}.")
    yield WeightRule("model.norm.weight", "norm.weight", (hidden,))
    if not spec.tied_embeddings:
        yield WeightRule("lm_head.weight", "head.weight", (vocab, hidden))


def _llama_layer(spec: DecoderSpec, source: str, target: str) -> Iterator[WeightRule]:
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.head_dim
    yield WeightRule(source + "input_layernorm.weight", target + "attention_norm.weight", (hidden,))
    yield WeightRule(source + "post_attention_layernorm.weight", target + "mlp_norm.weight", (hidden,))
    for part, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        name = f"{source}self_attn.{part}_proj"
        yield from _linear(name, target + "attention.qkv", heads * width, hidden, spec.qkv_bias, part)
    name = source + "self_attn.o_proj"
    yield from _linear(name, target + "attention.output", hidden, spec.num_heads * width, spec.o_bias)
    if spec.qk_norm:
        yield WeightRule(source + "self_attn.q_norm.weight", target + "attention.q_norm", (width,))
        yield WeightRule(source + "self_attn.k_norm.weight", target + "attention.k_norm", (width,))
    for index, part in enumerate(("gate", "up")):
        yield from _linear(f"{source}mlp.{part}_proj", target + "mlp.up", inner, hidden, spec.mlp_bias, index)
    yield from _linear(source + "mlp.down_proj", target + "mlp.down", hidden, inner, spec.mlp_bias)


def _linear(
    source: str, target: str, rows: int, columns: int, bias: bool, part: str | int | None = None
) -> Iterator[WeightRule]:
    yield WeightRule(source + ".weight", target + ".weight", (rows, columns), part)
    if bias:
        yield WeightRule(source + ".bias", target + ".bias", (rows,), part)


def gpt2_weights(spec: DecoderSpec) -> Iterator[WeightRule]:
    """Yield the tensors of a GPT-2 checkpoint. Its linear layers are Conv1D: [in, out], q, k and v fused."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    yield WeightRule("transformer.wte.weight", "embedding.weight", (spec.vocab_size, hidden))
    yield WeightRule("transformer.wpe.weight", "positions.weight", (spec.max_positions, hidden))
    for layer in range(spec.num_layers):
        source, target = f"transformer.h.{layer}.", f"layers.{layer}."
        for norm, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            yield WeightRule(f"{source}{norm}.weight", f"{target}{ours}.weight", (hidden,))
            yield WeightRule(f"{source}{norm}.bias", f"{target}{ours}.bias", (hidden,))
        yield from _conv1d(source + "attn.c_attn", target + "attention.qkv", hidden, 3 * hidden)
        yield from _conv1d(source + "attn.c_proj", target + "attention.output", hidden, hidden)
        yield from _conv1d(source + "mlp.c_fc", target + "mlp.up", hidden, inner)
        yield from _conv1d(source + "mlp.c_proj", target + "mlp.down", inner, hidden)
    yield WeightRule("transformer.ln_f.weight", "norm.weight", (hidden,))
    yield WeightRule("transformer.ln_f.bias", "norm.bias", (hidden,))
    if not spec.tied_embeddings:
        yield WeightRule("lm_head.weight", "head.weight", (spec.vocab_size, hidden))


def _conv1d(source: str, target: str, rows: int, columns: int) -> Iterator[WeightRule]:
    yield WeightRule(source + ".weight", target + ".weight", (rows, columns), transposed=True)
    yield WeightRule(source + ".bias", target + ".bias", (columns,))
