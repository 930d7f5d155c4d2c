"""A model as transformers makes it of config.json, on the device meta, and why it makes none of some."""

from __future__ import annotations

import difflib
import sys
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
import transformers
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import CheckpointError
from engine.models.blueprint import META
from engine.models.config import ModelConfig
from engine.models.registry import FAMILIES
from engine.models.transformers.attention import NAME
from engine.models.transformers.conditions import KINDS, LIMITED, picks_tokens


def outline(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model as transformers makes it of config.json, on the device meta.

    Raises `CheckpointError` for an architecture that it does not know, or that is no decoder of text alone.
    """
    values = dict(config.raw)
    if values.get("model_type") == "mistral" and values.get("layer_types"):
        values["model_type"] = "ministral"  # as `AutoConfig.from_pretrained` reads it
    kind = _class_of(config, str(values.get("model_type")))
    _write_out_attention(sys.modules[kind.__module__])
    try:
        hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
        wanted = kind.config_class
        with META:
            model = kind._from_config(
                hf_config if isinstance(hf_config, wanted) else hf_config.get_text_config(),
                dtype=dtype,
                attn_implementation=NAME,
            )
        model.config.get_text_config()  # raises where there are several
    except Exception as error:
        # Each type checks its config in its own way.
        raise CheckpointError(
            f"config.json: transformers {version('transformers')} makes no {config.architecture} over a paged cache: "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in model.modules():
        if picks_tokens(model.config) and isinstance(indexer := getattr(part, "indexer", None), nn.Module):
            indexer.forward = _picked
        if isinstance(part, PreTrainedModel):
            vars(part)["warn_if_padding_and_no_attention_mask"] = lambda *_: None  # or each step looks for padding
    return model.requires_grad_(False).eval()


def _class_of(config: ModelConfig, model_type: str) -> Any:
    """Return the class of transformers that a config is of; raises `CheckpointError` where it is none of text.

    What a file says of the architecture may differ in letters' case (PhiMoEForCausalLM), or be that of an older type.
    """
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    alike = config.architecture.casefold()
    if known is not None and (alike == known.casefold() or model_type == "ministral"):
        return getattr(transformers, known)
    if config.architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        kind = getattr(transformers, config.architecture)
        if kind.config_class.model_type == model_type:
            return kind
    raise CheckpointError(_unknown(config, known))


def _write_out_attention(module: ModuleType) -> None:
    """Have models that choose a class of attention by name take the one that writes it out, for ours."""
    for classes in vars(module).values():
        if isinstance(classes, dict) and isinstance(classes.get("eager"), type):
            classes.setdefault(NAME, classes["eager"])


def _unknown(config: ModelConfig, known: str | None) -> str:
    """Return what is known of an architecture that nobody here builds: its neighbours, its age, what it asks for."""
    architecture = config.architecture
    near = difflib.get_close_matches(architecture, sorted({*FAMILIES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}))
    advice = f"; the nearest that are known: {', '.join(near)}" if near else ""
    found = f"transformers {version('transformers')} has no such decoder of text for its model_type"
    if known is not None:
        found = f"of its model_type transformers makes {known}"
    written = str(config.raw.get("transformers_version", ""))
    if known is None and _is_newer(written):
        advice += f"; its config.json is of transformers {written}: an upgrade of that library may know it"
    kinds = set(config.raw.get("layer_types") or ()) - set(KINDS) - set(LIMITED)
    if kinds:
        advice += f"; its layers ask for {', '.join(sorted(map(str, kinds)))}"
    return f"config.json: architecture {architecture!r} is not supported: {found}{advice}"


def _is_newer(written: str) -> bool:
    """Whether a version is later than that of the installed transformers."""
    try:
        return Version(written) > Version(version("transformers"))
    except InvalidVersion:
        return False


def _picked(states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand in for an indexer where all tokens would be picked: attention sees all, whatever it gets."""
    return states.new_empty(*states.shape[:-1], 0, dtype=torch.int32)


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give the buffers that no checkpoint holds, such as the frequencies of rotations, their values."""
    owners = {
        inner: part for part in model.modules() if isinstance(part, PreTrainedModel) for inner in part.modules()
    }
    for module, owner in owners.items():
        missing = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not missing:
            continue
        for name in missing:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        # What fills buffers would fill the parameters, too.
        kept = [(part, part._parameters) for part in module.modules()]
        for part, _ in kept:
            part._parameters = _shadows(part)
        try:
            with torch.no_grad():
                owner._init_weights(module)
        finally:
            for part, parameters in kept:
                part._parameters = parameters


def _shadows(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return {
        name: None if old is None else nn.Parameter(torch.empty_like(old, device=META), requires_grad=False)
        for name, old in module._parameters.items()
    }
