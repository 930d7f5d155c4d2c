"""A decoder of transformers as one of our models: its own layers and head, our products, attention, cache and draws.

What it needs of a model: that it calls attention through `AttentionInterface`, or writes it out in a way that is
known, takes positions or counts them in an embedding, and keeps nothing but keys and values of its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from engine.attention.base import AttentionContext
from engine.errors import CheckpointError
from engine.kernels.base import Kernels
from engine.layers.attention import CachedAttention
from engine.layers.base import Build, Stored, WeightRule, weight_rules
from engine.models.blueprint import META, BlueprintGroup
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig
from engine.models.transformers.attention import Call, PagedAttention, Step, connect, record
from engine.models.transformers.conditions import check_calls, check_config, counted_masks, num_layers, picks_tokens
from engine.models.transformers.conversions import stored
from engine.models.transformers.entered import Entered
from engine.models.transformers.layers import ParallelEmbedding, StackedExperts, parallelise
from engine.models.transformers.outline import fill_buffers, outline
from engine.models.transformers.positions import ORDER, Counted, counted, tell
from engine.models.transformers.recognised import KernelMLP
from engine.models.transformers.rotations import replace_rotations
from engine.models.transformers.shapes import ShapesAlone

LAYER = re.compile(r"layers\.\d+")


class TransformersModel(CausalLM):
    """Any decoder of transformers whose attention is recognised and that keeps no other state.

    Raises `CheckpointError` with the reason for one that cannot be served so.
    """

    embedding: ParallelEmbedding

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        found = inspect(config, build)
        self.group = build.group
        self.hf = outline(config, build.dtype)
        self.body_name = _body_name(self.hf)
        embedding, head, replaced = parallelise(self.hf, build, found.uncalled)
        self.calls, self.step = found.calls, Step()
        paged = [PagedAttention(call, build) for call in found.calls]
        self.paged = nn.ModuleList(paged)
        connect(self.hf, found.calls, paged, self.step)
        tell(self.hf, found.counted, self.step.places)
        self.hidden_size, self.vocab_size = head.weight.shape[1], config.vocab_size
        self.logits_dtype = build.dtype
        self.cached = tuple(part for part in self.parts() if part.cache_spec(build.dtype) is not None)
        for index, layer in enumerate(self.cached):
            layer.cache_index = index
        self.layers_path = f"hf.{self.body_name}"
        # These are parts of `hf` already, where modules of torch look for them.
        layers, names = self.hf.get_submodule(self.body_name), _names(self.hf)
        vars(self).update(head=head, layers=layers, embedding=embedding, names=names)
        if build.group.device != META:
            fill_buffers(self.hf, build.group.device)
            if build.group.device.type == "cpu":  # elsewhere to compare cosines would halt the host in every step
                replaced.rotations, kept = replace_rotations(self.hf, found.calls, paged, self.step)
                replaced.left.update({f"the rotation of {name}": count for name, count in kept.items()})
            if build.group.rank == 0:
                replaced.log()

    @property
    @override
    def table(self) -> Tensor:
        return self.embedding.weight

    @override
    def attention_paths(self) -> Iterator[tuple[str, CachedAttention]]:
        for call, part in zip(self.calls, self.attention, strict=True):
            found = LAYER.search(call.path)
            yield call.path if found is None else found[0], part

    @property
    @override
    def kernels(self) -> Kernels:
        return self.cached[0].kernels

    @override
    def weights(self, on_disk: Collection[str] = ()) -> Iterator[WeightRule]:
        return weight_rules(self, self.names)

    @override
    def stored(self, names: Iterable[str], wanted: Iterable[str]) -> Stored:
        return stored(self.hf, names, wanted)

    @override
    def use_kernels(self, select: Callable[[int], Kernels]) -> None:
        found = {size: select(size) for size in dict.fromkeys(part.head_dim for part in self.attention)}
        for part in self.parts():
            part.kernels = found[part.head_dim if isinstance(part, CachedAttention) else next(iter(found))]

    @override
    def forward(self, input_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return the hidden states after the final norm: ids, positions [num_tokens] -> [num_tokens, hidden]."""
        with self.step.runs(context, positions):
            return _run(self.layers, input_ids, positions)

    @override
    def final(self, hidden: Tensor) -> Tensor:
        return hidden.float()

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.join(self._tail(hidden))

    @override
    def own_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self._tail(hidden)
        logits[:, self.head.num_own :] = float("-inf")
        return logits if out is None else out.copy_(logits)

    def _tail(self, hidden: Tensor) -> Tensor:
        """Do what the model does after its layers (head, scale, cap): its own `forward`, over states that are there.

        [num_samples, hidden] -> this rank's share of the logits, [num_samples, share].
        """
        body = self.hf._modules[self.body_name]
        self.hf._modules[self.body_name] = _States(hidden)
        try:
            logits: Tensor = self.hf(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
            return logits
        finally:
            self.hf._modules[self.body_name] = body


def _names(model: nn.Module) -> dict[str, str | tuple[str, ...]]:
    """Return what modules, and parameters of the outermost, are called in a checkpoint, by their paths."""
    found: dict[str, str | tuple[str, ...]] = {f"hf.{name}": name for name in (*model._parameters, *model._buffers)}
    for path, part in model.named_modules():
        if isinstance(part, ParallelEmbedding):
            found[f"hf.{path}.inner"] = path
        elif isinstance(part, StackedExperts | KernelMLP):
            found |= {f"hf.{path}.{inner}": name for inner, name in part.names(path)}
        found.setdefault(f"hf.{path}", path)
    return found


class _Output:
    """What layers return: hidden states, and nothing of all else that some models hand on."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _States(nn.Module):
    """In the place of a model's layers: returns hidden states that are there already."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._output = _Output(states.unsqueeze(0))
        object.__setattr__(self, "decoder", self)  # as OPT's is called

    @override
    def forward(self, *_: Any, **__: Any) -> _Output:
        return self._output


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is found out about a model before it is built.

    calls: of attention. counted: embeddings whose places it counts by itself. uncalled: paths of modules in its
    layers that compute nothing, while it may read their weights.
    """

    calls: list[Call]
    counted: list[Counted]
    uncalled: frozenset[str]


def inspect(config: ModelConfig, build: Build) -> Inspection:
    """Return what a model's layers ask of attention, heads of one rank, by running it over the device meta.

    Raises `CheckpointError` for a model that this backend cannot serve.
    """
    model = outline(config, build.dtype)
    text, name = model.config.get_text_config(), _body_name(model)
    check_config(text, build.max_positions)
    run = partial(_run, model.get_submodule(name))
    ids = torch.zeros(len(ORDER), dtype=torch.int32, device=META)
    written_out = None
    with META, counted_masks(model) as masks:
        parallelise(model, replace(build, group=BlueprintGroup(build.group.size)))
        shapes, entered = ShapesAlone(model), Entered(model)
        try:
            calls = record(model, lambda: run(ids, ids))
        except CheckpointError:
            calls = []
        if len(calls) < num_layers(text):
            masks.clear()
            written_out = entered
            calls = record(model, lambda: run(ids, ids), written_out)
        shapes.check([model.get_submodule(call.path) for call in calls], build.group.size)
        check_calls(model, calls, masks, build.max_positions)
        # As many tokens as a head has features: what is attention by its shapes is so in any step.
        longer = torch.zeros(calls[0].head_dim, dtype=torch.int32, device=META)
        if record(model, lambda: run(longer, longer), written_out) != calls:
            raise CheckpointError(f"config.json: {type(model).__name__} asks for other attention in longer steps")
        places: list[Counted] = []
        token = (getattr(text, "pad_token_id", None) or 0) + 1
        record(model, lambda: places.extend(counted(model, entered, run, token)), written_out)
    inside = (path for path, _ in model.named_modules() if path.startswith(f"{name}."))
    return Inspection(
        calls, places, frozenset(path for path in inside if model.get_submodule(path) not in shapes.called)
    )


def _run(body: nn.Module, input_ids: Tensor, positions: Tensor | None) -> Tensor:
    told = {} if positions is None else {"position_ids": positions.unsqueeze(0).long()}
    if picks_tokens(body.config):
        told["attention_mask"] = input_ids.new_zeros(1, 1, 1, 1)  # indexers take a slice of it
    states: Tensor = body(input_ids=input_ids.unsqueeze(0).long(), use_cache=False, **told)[0][0]
    return states


def _body_name(model: PreTrainedModel) -> str:
    """Return what a model calls all that lies before its head: that of its parts which has the embedding."""
    embedding = model.get_input_embeddings()
    for name, part in model.named_children():
        if any(inner is embedding for inner in part.modules()):
            return name
    raise CheckpointError(f"config.json: {type(model).__name__} has no layers that can be told from its head")
