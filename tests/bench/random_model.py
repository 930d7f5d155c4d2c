"""Random Qwen3-shaped checkpoints, of 100M parameters or more, with a tokenizer, and the load that is run on them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

VOCAB = 32_768
OF_100M = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
}
OF_06B = {  # as Qwen3-0.6B, https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
SIZES = {"100m": OF_100M, "0.6b": OF_06B}


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of token ids and how many tokens each wants."""

    prompts: list[list[int]]
    outputs: list[int]


def make_load(vocab: int, sequences: int = 64, seed: int = 0) -> Load:
    """Return prompts of 32 to 256 random ids, and outputs of 32 to 128 tokens."""
    pick = random.Random(seed)
    prompts = [[pick.randrange(10, vocab) for _ in range(pick.randint(32, 256))] for _ in range(sequences)]
    return Load(prompts, [pick.randint(32, 128) for _ in range(sequences)])


def save_random_model(folder: Path, seed: int = 0, sizes: dict[str, int] = OF_100M) -> None:
    """Write the checkpoint, in fp32, and a tokenizer of as many words."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of its one file
    torch.manual_seed(seed)
    config = Qwen3Config(
        **sizes,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_word_tokenizer(folder, sizes["vocab_size"])


def save_word_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of `vocab` words: w0 (padding, and all that is unknown), w1, w2 (the end), ..."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0").save_pretrained(folder)
