"""Small random checkpoints of every served architecture, made by transformers, and its answers as the oracle."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

VOCAB = 199  # odd, so that vocabularies that do not divide evenly over ranks are always tested
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
WINDOWED = {"use_sliding_window": True, "sliding_window": 9}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GRANITE = {
    "attention_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
CONFIGS = {
    "cohere": lambda: transformers.CohereConfig(
        **SMALL,
        head_dim=32,
        use_qk_norm=True,
        attention_bias=True,
        layer_norm_eps=1e-3,
        logit_scale=0.3,
        hidden_act="gelu_pytorch_tanh",
        rope_parameters=LLAMA3,
        tie_word_embeddings=False,
    ),
    "cohere_variant": lambda: transformers.CohereConfig(**SMALL),
    "cohere2": lambda: transformers.Cohere2Config(
        **SMALL,
        head_dim=32,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
        layer_norm_eps=1e-3,
        logit_scale=0.3,
        hidden_act="gelu_pytorch_tanh",
        rope_parameters=YARN,
        tie_word_embeddings=False,
    ),
    "cohere2_variant": lambda: transformers.Cohere2Config(**SMALL, sliding_window=11, sliding_window_pattern=2),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **{**SMALL, **DEEPSEEK, "q_lora_rank": None},
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.6},
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, **DEEPSEEK},
        n_group=4,
        topk_group=2,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4": lambda: transformers.Glm4Config(**SMALL, head_dim=16, pad_token_id=0),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SMALL,
        head_dim=32,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_shared_experts=2,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(
        **{name: value for name, value in {**SMALL, **DEEPSEEK}.items() if name != "first_k_dense_replace"}
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama3_tied_biased": lambda: transformers.LlamaConfig(
        **SMALL, rope_parameters=LLAMA3, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=24
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=9, query_pre_attn_scalar=24, final_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL,
        head_dim=32,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=16, sliding_window=9, num_local_experts=6, num_experts_per_tok=3, swiglu_limit=0.7
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SMALL,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=1.7,
        attention_bias=True,
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SMALL | GRANITE, num_local_experts=6),
    "granitemoeshared": lambda: transformers.GraniteMoeSharedConfig(
        **SMALL | GRANITE, num_local_experts=5, num_experts_per_tok=3, shared_intermediate_size=48
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SMALL,
        head_dim=16,
        intermediate_size_mlp=80,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=16,
        floor_scale=8,
        no_rope_layers=[1, 0, 1],
        pad_token_id=0,
    ),
    "llama4_all_experts": lambda: transformers.Llama4TextConfig(
        **SMALL, head_dim=16, num_local_experts=4, attention_chunk_size=32, use_qk_norm=False, pad_token_id=0
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **SMALL, head_dim=32, num_local_experts=6, num_experts_per_tok=3, partial_rotary_factor=0.5
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL),
    "olmo3": lambda: transformers.Olmo3Config(
        **SMALL,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "phi3": lambda: transformers.Phi3Config(**SMALL, sliding_window=11, pad_token_id=0),
    "phi3_longrope": lambda: transformers.Phi3Config(
        **SMALL,
        pad_token_id=0,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.5, 2.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2_windows": lambda: transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SMALL, **EXPERTS, **WINDOWED, max_window_layers=2, shared_expert_intermediate_size=48
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, **WINDOWED, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=5, sliding_window=11),
    "ministral": lambda: transformers.MinistralConfig(
        **SMALL,
        head_dim=32,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "ministral3": lambda: transformers.Ministral3Config(
        **SMALL,
        head_dim=32,
        rope_parameters=YARN | {"factor": 32.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=11),
    "stablelm": lambda: transformers.StableLmConfig(
        **SMALL, use_qkv_bias=True, layer_norm_eps=1e-3, partial_rotary_factor=0.5
    ),
    "stablelm_parallel": lambda: transformers.StableLmConfig(
        **SMALL,
        use_parallel_residual=True,
        qk_layernorm=True,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=256,
        vocab_size=VOCAB,
        bos_token_id=1,
        eos_token_id=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
}


WITH_EXPERTS = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "llama4",
    "llama4_all_experts",
    "minimax_m2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)

NET = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}

# Those that keep a recurrent state: steps say where it is, so they are run by the engine alone.
RECURRENT = {
    "lfm2": lambda: transformers.Lfm2Config(
        **SMALL | {"num_hidden_layers": 4},
        layer_types=["conv", "full_attention", "conv", "conv"],
        block_multiple_of=32,
        conv_bias=True,
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **SMALL | EXPERTS,
        **NET,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[2],
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SMALL | GRANITE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_heads=8,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_proj_bias=True,
        shared_intermediate_size=48,
        num_local_experts=6,
        position_embedding_type="rope",
    ),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **SMALL | EXPERTS,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        routed_scaling_factor=1.3,
        tie_word_embeddings=False,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **{name: value for name, value in SMALL.items() if name != "num_hidden_layers"},
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        head_dim=32,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=16,
        use_bias=True,
        n_routed_experts=8,
        n_group=2,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        moe_latent_size=24,
        routed_scaling_factor=1.5,
        time_step_min=1e-9,
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **SMALL,
        **NET,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
    ),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **SMALL | EXPERTS, **NET, shared_expert_intermediate_size=48
    ),
}


def make(name: str, folder: Path, **save) -> transformers.PreTrainedModel:
    """Save a random checkpoint of kind `name` in `folder` and return the model in fp32."""
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(
        (CONFIGS | RECURRENT)[name](), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the usual start, biases and norms included, so that every part matters for the tokens.
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer_name, buffer in model.named_buffers():
            if (
                buffer_name.endswith("bias") and buffer.is_floating_point()
            ):  # of experts' scores, which are no parameters
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder, **save)
    return model


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Return random ragged prompts, 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def oracle_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return the logits after every token: [len(tokens), vocab]."""
    return model(torch.tensor([tokens])).logits[0]


def check_against(model: transformers.PreTrainedModel, sequences, prompts_) -> None:
    """Compare logits and greedy tokens; a token may differ only where the oracle's two best are within rounding."""
    for sequence, prompt in zip(sequences, prompts_, strict=True):
        # Teacher forcing: the oracle sees our tokens, so that one near-tie does not end the comparison.
        expected = oracle_logits(model, sequence.tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(sequence.logits), expected, rtol=2e-4, atol=2e-4)
        best = expected.topk(2).values
        for row, token in enumerate(sequence.tokens[len(prompt) :]):
            assert token == int(expected[row].argmax()) or best[row, 0] - best[row, 1] < 1e-4
