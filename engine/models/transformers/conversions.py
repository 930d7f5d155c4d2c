"""From the tensors of a checkpoint to those of a model of transformers, by its own `conversion_mapping`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from engine.errors import CheckpointError
from engine.layers.base import Stored


@dataclass(slots=True)
class Made:
    """Tensors of a model that are made of several on disk, or of parts of one; read together, when asked for.

    sources: name on disk, with the pattern of the converter that it fits.
    """

    target: str
    converter: WeightConverter
    model: PreTrainedModel
    sources: list[tuple[str, str]] = field(default_factory=list)

    def tensors(self, read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        """Return them by their names in the model. read: returns a tensor on disk by its name."""
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, partial(read, name))
        found: Mapping[str, Any] = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def stored(model: PreTrainedModel, names: Iterable[str], wanted: Iterable[str]) -> Stored:
    """Return how tensors with these names on disk are held. model: any with the class and config. wanted: its own."""
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known = dict.fromkeys(wanted, True)
    plain: dict[str, str] = {}
    made: dict[str, Made] = {}
    unknown: list[str] = []
    unneeded = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
    prefix = model.base_model_prefix
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            if not any(ignored.search(target) or ignored.search(name) for ignored in unneeded):
                unknown.append(name)
        elif pattern is None:
            if target in plain:
                raise CheckpointError(f"the checkpoint holds {target} twice: {plain[target]} and {name}")
            plain[target] = name
        else:
            one = made.setdefault(target, Made(target, by_pattern[pattern], model))
            one.sources.append((name, pattern))
    for name, other in model.all_tied_weights_keys.items():  # such as a head's bias, which is saved once
        for lacking, held in ((name, other), (other, name)):
            if lacking in known and lacking not in plain and held in plain:
                plain[lacking] = plain[held]
    # What is made beside the first of a converter's targets is known when it was made.
    several = any(len(one.converter.target_patterns) > 1 for one in made.values())
    lacking = [] if several else sorted(known.keys() - plain.keys() - made.keys())
    return Stored(plain, list(made.values()), lacking, unknown)
