"""Write a Qwen3 checkpoint as GGUF, in llama.cpp's environment: `PYTHON make_gguf.py CHECKPOINT FILE DTYPE`.

Names and settings are those of llama.cpp's own converter. No vocabulary is written: token ids go in and out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np

KINDS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
TABLES = {**KINDS, "int4": gguf.GGMLQuantizationType.Q8_0}  # gguf's Python writes no Q6_K, llama.cpp's usual choice
TABLE = "model.embed_tokens.weight"
HEADER = 8  # bytes, of a safetensors file: the length of the JSON that follows


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return the weights of a checkpoint of one file in fp32, by name."""
    file = np.memmap(checkpoint / "model.safetensors", np.uint8, "r")
    begin = HEADER + int(file[:HEADER].view("<u8")[0])
    found = {}
    for name, about in json.loads(file[HEADER:begin].tobytes()).items():
        if name == "__metadata__":
            continue
        if about["dtype"] != "F32":
            raise ValueError(f"{name} is {about['dtype']}; only checkpoints in F32 are converted")
        start, end = (begin + offset for offset in about["data_offsets"])
        found[name] = np.frombuffer(file[start:end].tobytes(), "<f4").reshape(about["shape"])
    return found


def settings(writer: gguf.GGUFWriter, config: dict) -> None:
    """Write what llama.cpp has to know of the model."""
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def main() -> None:
    checkpoint, out, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((checkpoint / "config.json").read_text())
    if not config["tie_word_embeddings"]:
        raise ValueError("only checkpoints whose output is the table of embeddings are converted")
    writer = gguf.GGUFWriter(out, "qwen3")
    settings(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, weight in tensors(checkpoint).items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise ValueError(f"GGUF has no name for {name}")
        if weight.ndim == 1:  # norms stay in fp32, as llama.cpp wants them
            writer.add_tensor(theirs, weight)
        else:
            dtype = (TABLES if name == TABLE else KINDS)[kind]
            data = gguf.quants.quantize(weight, dtype)
            writer.add_tensor(theirs, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
