"""Small real tokenizers, trained in milliseconds, for tests that need text but no model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEXT = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a small process in a large cluster.",
    "def join(path, *paths): return path + '/' + '/'.join(paths)\n\nprint('hello world', 1 + 2)\n",
    "Grüße aus Köln, naïve café, Ελλάδα, Москва, 東京, 🙂🙂 👩‍👩‍👧 🇩🇪",
] * 4
CHAT_TEMPLATE = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('no role ' + message['role']) -}}{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}"
    "{%- if enable_thinking -%}<think>{%- endif -%}{%- endif -%}"
)


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE, as Llama 3, Qwen and GPT-2 have it: few merges, so that an emoji is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def with_ends(tokenizer: Tokenizer) -> Tokenizer:
    """Return it as one that puts special tokens around each text, as those of embedding models do."""
    ends = [(token, tokenizer.token_to_id(token)) for token in SPECIAL[:2]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A {SPECIAL[1]}", special_tokens=ends
    )
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """BPE with byte fallback and a leading space, as Llama 2 and Mistral have it."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, limit_alphabet=60
    )
    tokenizer.train_from_iterator(TEXT[:2], trainer)
    state = tokenizer.get_vocab_size()
    tokenizer.add_tokens(byte_tokens)
    assert tokenizer.get_vocab_size() == state + 256
    return tokenizer


def metaspace() -> Tokenizer:
    """A unigram tokenizer with no byte fallback, as T5 has it: none of the byte tables fits it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def save(backend: Tokenizer, folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a tokenizer folder as transformers does."""
    known = [token for token in SPECIAL if backend.token_to_id(token) is not None]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>" if known else None,
        eos_token="<|eos|>" if known else "</s>",
        additional_special_tokens=known[2:],
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder
