"""Tiny random checkpoints of every decoder type of transformers, and what the transformers library makes of them.

    python -m tests.parity.census [--tensor-parallel-size 2] [--model-impl native] [TYPE ...]

prints a line for each type: served with the library's own tokens, or why not.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import SquadronError
from engine.llm import LLM
from engine.loader.checkpoint import open_model
from engine.models.blueprint import blueprint
from engine.models.config import ModelConfig
from engine.sampling_params import SamplingParams
from tests import tiny_tokenizer

TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SERVED = "the same tokens"
TOKENS = 24
LONGEST = 2  # of the prompts
MOST_PARAMETERS = 4_000_000
BLOCKS = 9  # of 16 tokens, fewer than all sequences fill
# Whatever of these a config has is made small.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "emb_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "intermediate_size_mlp"), 96
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(
        ("qk_nope_head_dim", "v_head_dim", "head_dim", "global_head_dim", "hidden_size_per_layer_input"), 16
    ),
    **dict.fromkeys(("sliding_window", "attention_window"), 24),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 320),
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_global_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DELTA_NET = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 256}
DECODES = {"is_decoder": True}
# What a small config of some types needs beside: other names of sizes, layers of each kind.
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "axk1", "youtu"), LATENT),
    **dict.fromkeys(("deepseek_v32", "axk2", "glm_moe_dsa", "hy_v4"), LATENT | INDEXER),
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"), DECODES),
    **dict.fromkeys(("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer"), DECODES),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), DECODES),
    "blt": {"encoder_hash_byte_group_vocab": 320, "encoder_hash_byte_group_size": [3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_types": 2, "segment_types": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **dict.fromkeys(
        ("dots3_note", "dots3_note_text"),
        {"num_key_value_heads": 4, "head_dim": 24}
        | INDEXER
        | {"per_layer_config": {}, "shared_experts_intermediate_size": 32},
    ),
    "falcon": {"num_kv_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0] * 2,
    },
    "git": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 24},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]} | MAMBA,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jetmoe": {"num_attention_heads": 4, "num_key_value_heads": 2, "kv_channels": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16},
    "mllama": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": {"ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), DELTA_NET),
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"),
        DELTA_NET
        | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64}
        | {"indexer_compress_ratio": 4, "ngram_vocab_size_base": 320, "hc_lowrank": 8},
    ),
    "reformer": DECODES
    | {"attn_layers": ["local", "lsh"], "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": DECODES
    | {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 320,
        "shape_embed_dim": 16,
        "shape_vocab_size": 320,
    },
    "xglm": {"attention_heads": 4},
    "xlm": {"causal": True},
    "xmod": DECODES | {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "mamba_dt_rank": 4,
    },
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}
# Small parts of models that are more than their text half: what `SMALL` does not make small.
PARTS: dict[str, dict[str, Any]] = {"phi4_multimodal_audio": {"num_blocks": 1, "nemo_conv_channels": 32}}
# Types that the small sizes make no model of.
NOT_SMALL = frozenset(
    [
        "gemma3n",  # its other half is of the library timm
        "gemma4_assistant",  # drafts for another model, whose keys and values it reads
        "gemma4_unified_assistant",
    ]
)
# Types that their native families alone serve: they keep a recurrent state.
NATIVE = frozenset(
    [
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    ]
)
# Types that the engine refuses, on however many ranks.
REFUSED = frozenset(
    [
        "bailing_hybrid",
        "bamba",
        "big_bird",
        "bigbird_pegasus",
        "bloom",
        "blt",
        "camembert",
        "cpmant",
        "data2vec-text",
        "deepseek_v4",
        "doge",
        "falcon_h1",
        "falcon_mamba",
        "gpt_neo",
        "inkling2_text",
        "inkling_text",
        "jamba",
        "jetmoe",
        "kimi_linear",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "mpt",
        "musicgen",
        "musicgen_melody",
        "olmo_hybrid",
        "openai-gpt",
        "prophetnet",
        "qwen4_exp",
        "qwen4_exp_text",
        "recurrent_gemma",
        "reformer",
        "roberta",
        "roberta-prelayernorm",
        "rwkv",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xlstm",
        "xmod",
        "zamba",
        "zamba2",
        "zaya",
    ]
)
# Types that transformers' layers serve on one rank alone: without a plan, or with one that is refused.
ONE_RANK = frozenset(
    [
        "bart",
        "bert",
        "bert-generation",
        "biogpt",
        "bitnet",
        "blenderbot",
        "blenderbot-small",
        "codegen",
        "ctrl",
        "electra",
        "ernie",
        "falcon",
        "fuyu",
        "gemma3n_text",
        "git",
        "gpt-sw3",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox_japanese",
        "gptj",
        "llama4",
        "llama4_text",
        "longcat_flash",
        "marian",
        "mbart",
        "megatron-bert",
        "mllama",
        "modernbert-decoder",
        "moshi",
        "mvp",
        "opt",
        "pegasus",
        "persimmon",
        "plbart",
        "rembert",
        "roc_bert",
        "roformer",
        "stablelm",
        "trocr",
        "whisper",
        "xglm",
    ]
)
# So that prefixes as short as these prompts are found where a recurrent state is kept.
SNAPSHOTS = {"state_snapshot_blocks": 1, "num_state_snapshots": 40}
OPTIONAL = ("bos_token_id", "eos_token_id", "pad_token_id")  # made small where they are null, too


@dataclass(frozen=True, slots=True)
class Oracle:
    """A checkpoint with prompts and the tokens that transformers generates greedily from them.

    logprobs: of the tokens of the longest prompt after its first. Small models with a tied head tend to repeat one
    token, whatever their layers do.
    """

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: torch.Tensor


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a config of a type with small sizes, two layers, or one of each kind, and its other fields' defaults.

    Of a model that is more than its text half the config is whole where the type's class is.
    """
    default = AutoConfig.for_model(model_type)
    wanted = model_class(model_type).config_class
    if not isinstance(default, wanted):
        default = next((half for half in vars(default).values() if isinstance(half, wanted)), default)
    config: PreTrainedConfig = type(default)(**shrunk(default) | MORE.get(model_type, {}))
    return config


def model_class(model_type: str) -> Any:
    """Return the class of transformers that a type's causal language model is."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def shrunk(default: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a config that are made small, those of its parts in dicts of their own."""
    said = default.to_dict()
    small = {name: value for name, value in SMALL.items() if name in said}
    small = {name: value for name, value in small.items() if said[name] is not None or name in OPTIONAL}
    for name in ("num_key_value_heads", "num_kv_heads"):
        if said.get(name) is not None:
            alike = said[name] == said.get("num_attention_heads", said.get("n_head"))
            small[name] = 4 if alike or "kv_lora_rank" in said else 2
    if kinds := list(dict.fromkeys(said.get("layer_types") or ())):
        small["num_hidden_layers"] = max(2, len(kinds))
        small["layer_types"] = (kinds * 2)[: small["num_hidden_layers"]]
    if kinds := list(dict.fromkeys(said.get("mlp_layer_types") or ())):
        small["mlp_layer_types"] = (kinds * 4)[: small.get("num_hidden_layers", 2)]
    for name, part in vars(default).items():
        if isinstance(part, PreTrainedConfig):
            known = PARTS.get(part.model_type, {}) | MORE.get(part.model_type, {})
            small[name] = {"model_type": part.model_type} | shrunk(part) | known
    return small


def why_no_tiny_model(model_type: str) -> str | None:
    """Return why there is no small random model of a type, None where there is one."""
    try:
        with torch.device("meta"):
            model = model_class(model_type)(tiny_config(model_type))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    size = sum(weight.numel() for weight in model.parameters())
    return None if size <= MOST_PARAMETERS else f"its small config has {size:,} parameters"


def model_config(model_type: str, **more: Any) -> ModelConfig:
    """Return the tiny config of a type as our engine reads it, for transformers' layers."""
    named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]}
    return replace(ModelConfig.of(tiny_config(model_type).to_dict() | named | more), implementation="transformers")


def save_oracle(model_type: str, folder: Path, **more: Any) -> Oracle:
    """Save a random model of a type and generate from it. more: fields of its config."""
    config = tiny_config(model_type)
    model = _random_model(model_class(model_type), type(config)(**config.to_dict() | more))
    model.save_pretrained(folder)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)
    random.seed(model_type)
    prompts = [[random.randrange(3, 250) for _ in range(length)] for length in (3, 17, 40, 9)]
    tokens = [_greedy(model, prompt) for prompt in prompts]
    return Oracle(folder, prompts, tokens, _logprobs(model, prompts[LONGEST]))


@torch.no_grad()
def _logprobs(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def _random_model(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            near = 1.0 if parameter.ndim == 1 and "norm" in name and "bias" not in name else 0.0
            parameter.data = torch.empty(parameter.shape).normal_(
                near, 0.1
            )  # some are expanded, not their own memory
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of experts' scores, which are no parameters
                buffer.normal_(0.0, 0.1)
    return model


@torch.no_grad()
def _greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Return tokens that are computed from the whole text each time, without a cache."""
    text = list(prompt)
    for _ in range(TOKENS):
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        if not logits.isfinite().all():
            raise ValueError("the random model gives no finite logits")
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


def check(oracle: Oracle, tensor_parallel_size: int = 1, model_impl: str = "transformers", **more: Any) -> None:
    """Serve a checkpoint: chunks, a cache too small for all, a prefix hit, n = 2. more: of the engine's config."""
    llm = LLM(
        str(oracle.folder),
        model_impl=model_impl,
        dtype="float32",
        device="cpu",
        max_model_len=128,
        num_kv_blocks=BLOCKS,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        tensor_parallel_size=tensor_parallel_size,
        **more,
        **(SNAPSHOTS if _keeps_states(oracle.folder, model_impl) else {}),
    )
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with llm:
        found = llm.generate(oracle.prompts, greedy, use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in found] == oracle.tokens
        assert llm.stats().preemptions, "the cache has held all"
        longest, expected = oracle.prompts[LONGEST], oracle.tokens[LONGEST]
        hits = llm.stats().prefix_hit_tokens
        both = SamplingParams(max_tokens=TOKENS - 8, temperature=0.0, ignore_eos=True, n=2)
        (again,) = llm.generate([longest + expected[:8]], both, use_tqdm=False)
        assert [list(choice.token_ids) for choice in again.outputs] == [expected[8:]] * 2
        assert llm.stats().prefix_hit_tokens > hits, "nothing was found in the prefix cache"
        scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (one,) = llm.generate([longest], scored, use_tqdm=False)
        told = torch.tensor([token.logprob for token in one.prompt_logprobs[1:] if token is not None])
        torch.testing.assert_close(told, oracle.logprobs, rtol=1e-4, atol=1e-4)


def _keeps_states(folder: Path, model_impl: str) -> bool:
    return blueprint(open_model(str(folder), impl=model_impl).config).keeps_states


@cache
def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--model-impl", default="transformers", choices=("auto", "native", "transformers"))
    return parser


def census(types: Iterable[str], tensor_parallel_size: int, model_impl: str) -> None:
    """Print a line for each type, and a last one with how many are served."""
    served = []
    for model_type in types:
        began = time.perf_counter()
        try:
            told = why_no_tiny_model(model_type) or _served(model_type, tensor_parallel_size, model_impl)
            served += [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]] * (told == SERVED)
        except SquadronError as error:
            told = f"refused: {error}"
        except Exception as error:
            told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(f"{model_type}: {told[:300]} ({time.perf_counter() - began:.1f} s)", flush=True)
    print(f"{len(served)} types give the same tokens, of {len(set(served))} architectures")


def _served(model_type: str, tensor_parallel_size: int, model_impl: str) -> str:
    if model_impl == "transformers":
        blueprint(model_config(model_type), tensor_parallel_size)
    with tempfile.TemporaryDirectory() as folder:
        check(save_oracle(model_type, Path(folder)), tensor_parallel_size, model_impl)
    return SERVED


if __name__ == "__main__":
    given = _arguments().parse_args()
    census(given.types or TYPES, given.tensor_parallel_size, given.model_impl)
