"""Attention as transformers' models call it, over our paged cache; see transformers' `AttentionInterface`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.attention.base import AttentionContext, MergedHeads
from engine.errors import CheckpointError
from engine.kernels.base import Kernels
from engine.layers.attention import CachedAttention
from engine.layers.base import Build
from engine.models.transformers.entered import Entered
from engine.models.transformers.written_out import WrittenOut

NAME = "squadron_paged"
_PLACE = "_squadron_paged"  # attribute of transformers' attention modules: their layers and the step
# What a call may hand over beside queries, keys and values: what is obeyed, and what changes no result.
OBEYED = frozenset({"is_causal", "sliding_window", "softcap", "s_aux"})
HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class Step:
    """The step that is being computed: set before the layers run, read by each call of attention."""

    def __init__(self) -> None:
        self.context: AttentionContext | None = None
        self._positions: Tensor | None = None
        self._turns: Counter[nn.Module] = Counter()
        self._rotations: list[tuple[Tensor, Tensor, Any]] = []

    @contextmanager
    def runs(self, context: AttentionContext, positions: Tensor) -> Iterator[None]:
        """Have the layers attend by `context` meanwhile. positions: of the tokens."""
        self.context, self._positions = context, positions
        self._turns.clear()
        try:
            yield
        finally:
            self.context = self._positions = None
            self._rotations.clear()

    def places(self) -> Tensor:
        """Return the positions of the tokens."""
        if self._positions is None:
            raise RuntimeError("positions were asked for outside of a step")
        return self._positions

    def turn(self, module: nn.Module) -> int:
        """Return how often a module has attended in this step, and count it."""
        turn = self._turns[module]
        self._turns[module] = turn + 1
        return turn

    def rotation(self, cos: Tensor, sin: Tensor, kernels: Kernels) -> Any:
        """Return what `kernels.norm_rotate` takes of cosines and sines [1, num_tokens, head_dim], None if it cannot.

        They are read once in a step: its layers are handed the same tensors.
        """
        for known_cos, known_sin, rotation in self._rotations:
            if known_cos is cos and known_sin is sin:
                return rotation
        angles = torch.stack((cos[0], sin[0]), dim=1)
        first, second = angles.chunk(2, dim=-1)
        # Our kernels turn both features of a pair by one angle. Some models have one for each.
        rotation = kernels.rotation(first.float().contiguous()) if torch.equal(first, second) else None
        self._rotations.append((cos, sin, rotation))
        return rotation


class PagedAttention(CachedAttention):
    """What one call of attention in a model asks of the cache. Keys and values are padded to one width.

    value_dim: of the values, where they are narrower than keys (DeepSeek's MLA).
    """

    def __init__(self, call: Call, build: Build) -> None:
        window = call.window if call.window < build.max_positions else 0
        super().__init__(
            call.heads,
            call.kv_heads,
            call.head_dim,
            all_kv_heads=call.kv_heads * build.group.size,
            window=window,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        self.value_dim = call.value_dim

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, context: AttentionContext
    ) -> Tensor:
        """Attend: [1, heads, num_tokens, head_dim] -> [1, num_tokens, heads, value_dim]. sinks: [heads] or None."""
        if self.value_dim < self.head_dim:
            value = F.pad(value, (0, self.head_dim - self.value_dim))
        heads = torch.cat([each[0].transpose(0, 1) for each in (query, key, value)], dim=1)
        scores = None if sinks is None else sinks.float().contiguous()
        merged = MergedHeads(heads, None, None, 0.0, self.kernels.norm_rotate, scores)
        attended = context.attend(self.cache_index, merged, self.window)
        return attended[None, ..., : self.value_dim]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention; heads of one rank. window: 0 = all tokens.

    path: of the module that calls. turn: how often it has called before, in one step. written_out: whether it calls
    no function for it, but writes it out.
    """

    path: str
    turn: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    sinks: bool
    written_out: bool


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in the paged cache of the step that is computed; arguments as of `AttentionInterface`."""
    recorder = _Recorder.current
    if recorder is not None:
        return recorder.record(module, query, key, value, attention_mask, scaling, others), None
    layers, step = getattr(module, _PLACE)
    if step.context is None:
        raise RuntimeError("attention was called outside of a step")
    layer = layers[step.turn(module)]
    return layer(query, key, value, others.get("s_aux"), step.context), None


class _Recorder:
    """Records the calls of attention of one pass on the device meta."""

    current: _Recorder | None = None

    def __init__(self, model: nn.Module, written_out: bool) -> None:
        self._written_out = written_out
        self.calls: list[Call] = []
        self._paths = {module: path for path, module in model.named_modules()}

    def record(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        others: dict[str, Any],
    ) -> Tensor:
        """Keep what a call asks for; returns what has the shape of its result."""
        path = self._paths[module]
        head_dim, value_dim = query.shape[-1], value.shape[-1]
        others.setdefault("is_causal", getattr(module, "is_causal", True))
        self._refuse(path, mask, others)
        if key.shape[2] != query.shape[2] or value_dim > head_dim:
            raise CheckpointError(f"config.json: {path} attends to other keys than those of its own tokens")
        if key.shape[1] != value.shape[1]:
            raise CheckpointError(
                f"config.json: {path} has {value.shape[1]} heads of values for {key.shape[1]} of keys"
            )
        scale = head_dim**-0.5 if scaling is None else float(scaling)
        window, softcap = int(others.get("sliding_window") or 0), float(others.get("softcap") or 0.0)
        self.calls.append(
            Call(
                path,
                sum(call.path == path for call in self.calls),
                query.shape[1],
                key.shape[1],
                head_dim,
                value_dim,
                scale,
                window,
                softcap,
                others.get("s_aux") is not None,
                self._written_out,
            )
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value_dim)

    def _refuse(self, path: str, mask: Tensor | None, others: dict[str, Any]) -> None:
        told = {name for name, given in others.items() if given is not None and not _is_empty(given)}
        asked = sorted(told - OBEYED - HARMLESS)
        if mask is not None and mask.numel() > 1:  # one number hides nothing
            asked.append("a mask of its own")
        if others.get("is_causal") is False:
            asked.append("attention that is not causal")
        if asked:
            raise CheckpointError(
                f"config.json: {path} wants {', '.join(asked)}, which the paged attention does not have"
            )


def _is_empty(given: object) -> bool:
    return isinstance(given, Tensor) and not given.numel()


def record(model: nn.Module, run: Callable[[], object], written_out: Entered | None = None) -> list[Call]:
    """Run a model over the device meta and return its calls of attention, in order.

    written_out: follows the model, where it writes its attention out. Raises `CheckpointError` for what a paged cache
    cannot give, and where the model asks for the contents of a tensor.
    """
    recorder = _Recorder.current = _Recorder(model, written_out is not None)
    try:
        with torch.no_grad(), nullcontext() if written_out is None else WrittenOut(written_out.current, _finish):
            run()
    except CheckpointError:
        raise
    except Exception as error:
        # Anything may come out of a model that was not written for this.
        raise CheckpointError(
            f"config.json: {type(model).__name__} does not run over a paged cache: {type(error).__name__}: {error}"
        ) from error
    finally:
        _Recorder.current = None
    return recorder.calls


def connect(model: nn.Module, calls: Sequence[Call], layers: Iterable[nn.Module], step: Step) -> None:
    """Have each module that calls attention find its layers, one for each call of a step, and the step."""
    own: defaultdict[str, list[nn.Module]] = defaultdict(list)
    for call, layer in zip(calls, layers, strict=True):
        own[call.path].append(layer)
    for path, found in own.items():
        object.__setattr__(model.get_submodule(path), _PLACE, (found, step))
    for path in {call.path for call in calls if call.written_out}:
        _watch(model.get_submodule(path))


def _watch(module: nn.Module) -> None:
    """Have a module that writes its attention out attend to the cache."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with WrittenOut(lambda: module, _finish):
            return plain(*args, **kwargs)

    module.forward = forward


def _finish(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return attend(module, query, key, value, None, scale)[0]


AttentionInterface.register(NAME, attend)
