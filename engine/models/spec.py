"""What one decoder-only transformer looks like, apart from its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al., RoFormer) and how its frequencies are stretched.

    kind: "default"; "linear" divides all frequencies by `factor`; "llama3" (Llama 3.1) divides the low ones only.
    low_freq_factor, high_freq_factor, original_max_positions: of "llama3" alone.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """How the linear layers inside a decoder's layers are held; embeddings and output head stay as they are.

    method: the name of `--quantization`. weights: "fp8" (e4m3, activations too) or "int8" (weights alone), with a
    scale per output channel. stored: in the checkpoint, else made as plain weights are loaded. ignore: modules that
    stay plain, by their names in the checkpoint, parts of these between dots, or "re:" and a regular expression.
    packed: four int8 in an int32 on disk, counted from -128.
    """

    method: str
    weights: str
    stored: bool = True
    ignore: tuple[str, ...] = ()
    packed: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Everything that `engine.models.decoder.Decoder` needs to build itself.

    rope: None = learned absolute positions.
    qk_norm: RMSNorm of each head's query and key before the rotation.
    sliding_windows: per layer, how many last tokens a query sees (itself included); 0 = all.
    attention_softcap, logits_softcap: cap c in c * tanh(x / c); 0 = none.
    checkpoint_dtype: what the weights were saved in, by torch's name such as "bfloat16".
    eos_token_ids: tokens that end a text, as the model's own files say; may be empty.
    quantization: of the checkpoint, None = plain weights.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: str
    gated_mlp: bool
    rope: RopeSpec | None
    sliding_windows: tuple[int, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    checkpoint_dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantization: QuantizationSpec | None = None

    @property
    def attention_scale(self) -> float:
        """Factor on the products of queries and keys."""
        return float(self.head_dim**-0.5)
