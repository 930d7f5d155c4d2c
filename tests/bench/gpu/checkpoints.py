"""Checkpoints of real shapes with random weights, made where they are measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.bench.gpu.shapes import Shape
from tests.bench.random_model import save_word_tokenizer

SHARD_BYTES = 4 << 30
LOGIT_SCALE = 3.0  # standard deviation of the logits: as peaked as those of a trained model, and no tie of all
INDEX = "model.safetensors.index.json"


def checkpoint(shape: Shape, root: Path, device: torch.device) -> Path:
    """Return the folder of a bf16 checkpoint of this shape under `root`; it is made if it is not there.

    Weights come from a generator of `device`: another device, or another torch, makes other ones.
    """
    folder = root / f"{shape.name}-{shape.hidden}x{shape.layers}"
    if folder.is_dir():
        return folder
    half_made = root / f".{folder.name}"
    shutil.rmtree(half_made, ignore_errors=True)
    half_made.mkdir(parents=True)
    (half_made / "config.json").write_text(json.dumps(shape.config(), indent=1), encoding="utf-8")
    save_word_tokenizer(half_made, shape.vocab)
    _save(shape, half_made, device)
    half_made.rename(folder)
    return folder


def _save(shape: Shape, folder: Path, device: torch.device) -> None:
    """Write the weights in shards, and the index that says which is where."""
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total, number = 0, 1

    def write() -> None:
        nonlocal shard, number
        name = f"model-{number:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard, number = {}, number + 1

    for name, tensor in weights(shape, device):
        shard[name] = tensor.cpu()
        total += tensor.nbytes
        if sum(one.nbytes for one in shard.values()) > SHARD_BYTES:
            write()
    write()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def weights(shape: Shape, device: torch.device, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint by name, in bf16.

    Matrices keep the size of what they multiply; what is added to the residual is the smaller the more layers add to
    it; norms scatter about 1, so that a norm that is left out shows.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        drawn = torch.empty(rows, columns, device=device, dtype=torch.bfloat16).normal_(generator=generator)
        return drawn.mul_(scale)

    def norm(size: int) -> Tensor:
        drawn = torch.empty(size, device=device, dtype=torch.bfloat16)
        return drawn.uniform_(0.75, 1.25, generator=generator)

    hidden, inner, out = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    added = (2 * shape.layers) ** -0.5
    yield "model.embed_tokens.weight", normal(shape.vocab, hidden, LOGIT_SCALE * hidden**-0.5)
    for layer in range(shape.layers):
        here = f"model.layers.{layer}."
        for name, rows in (("q", inner), ("k", out), ("v", out)):
            yield f"{here}self_attn.{name}_proj.weight", normal(rows, hidden, hidden**-0.5)
        yield f"{here}self_attn.o_proj.weight", normal(hidden, inner, added * inner**-0.5)
        if shape.family == "qwen3":
            yield f"{here}self_attn.q_norm.weight", norm(shape.head_dim)
            yield f"{here}self_attn.k_norm.weight", norm(shape.head_dim)
        for name in ("gate", "up"):
            yield f"{here}mlp.{name}_proj.weight", normal(shape.intermediate, hidden, hidden**-0.5)
        yield f"{here}mlp.down_proj.weight", normal(hidden, shape.intermediate, added * shape.intermediate**-0.5)
        yield f"{here}input_layernorm.weight", norm(hidden)
        yield f"{here}post_attention_layernorm.weight", norm(hidden)
    yield "model.norm.weight", norm(hidden)
    if not shape.tied:
        yield "lm_head.weight", normal(shape.vocab, hidden, LOGIT_SCALE * hidden**-0.5)
