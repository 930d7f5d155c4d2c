"""The same decode steps with one setting changed at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError
from tests.bench.gpu.bench import Bench, NotHere
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import HALF, Limits, decode_limit
from tests.bench.gpu.part_decode import BUDGET, FILLING, prompt_length
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.session import session, supported
from tests.bench.gpu.shapes import Shape


@dataclass(frozen=True, slots=True)
class Toggle:
    """One engine, by the settings in which it differs. weight, kv: bytes of an element of layers, of K and V."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight: float = HALF
    kv: float = HALF


TOGGLES = (
    Toggle("default"),
    Toggle("eager", {"enforce_eager": True}),
    Toggle("overlap", {"async_scheduling": True}),
    Toggle("no-overlap", {"async_scheduling": False}),
    Toggle("batch-invariant", {"batch_invariant": True}),
    Toggle("triton", {"attention_backend": "triton"}),
    Toggle("flash", {"attention_backend": "flash"}),
    Toggle("torch_varlen", {"attention_backend": "torch_varlen"}),
    Toggle("block-64", {"block_size": 64}),
    Toggle("fp8-weights", {"quantization": "fp8"}, weight=1),
    Toggle("int8-weights", {"quantization": "int8"}, weight=1),
    Toggle("fp8-kv", {"kv_cache_dtype": "fp8"}, kv=1),
    Toggle("fp8-both", {"quantization": "fp8", "kv_cache_dtype": "fp8"}, weight=1, kv=1),
)


def part(scale: Scale, name: str) -> Part:
    """Return the toggles of one shape, at the smallest and the largest batch."""
    shape, stem = scale.shape(name), f"toggles-{name}"
    figures = tuple(_figure(scale, shape, toggle, batch) for toggle in TOGGLES for batch in _batches(scale))
    title = f"Decoding at {scale.context:,} tokens of context with one setting changed, {name}"
    return Part(stem, title, figures, lambda bench: _run(bench, shape))


def _batches(scale: Scale) -> tuple[int, int]:
    return scale.batches[0], scale.batches[-1]


def _name(shape: Shape, toggle: Toggle, batch: int) -> str:
    return f"toggles-{shape.name}/{toggle.name}/{batch}"


def _figure(scale: Scale, shape: Shape, toggle: Toggle, batch: int) -> Figure:
    def limit(limits: Limits) -> float:
        return decode_limit(shape, batch, scale.context, limits, toggle.weight, toggle.kv)

    flags = " ".join(_flag(name, value) for name, value in toggle.settings.items()) or "as it comes"
    return Figure(_name(shape, toggle, batch), f"`{flags}`, batch {batch}", "tokens/s", limit)


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    return {True: f"--{flag}", False: f"--no-{flag}"}.get(value, f"--{flag} {value}")


def _run(bench: Bench, shape: Shape) -> None:
    for toggle in TOGGLES:
        names = [_name(shape, toggle, batch) for batch in _batches(bench.scale)]
        bench.measure(lambda toggle=toggle: _rates(bench, shape, toggle), *names)


def _rates(bench: Bench, shape: Shape, toggle: Toggle) -> list[list[float]]:
    """Return tokens/s at each batch size, three windows each. Raises `NotHere` for what cannot be set here."""
    scale, found = bench.scale, []
    settings = supported(**toggle.settings)
    longest = scale.context + FILLING + scale.warm + scale.windows * scale.steps
    shared = {
        "max_model_len": scale.max_model_len,
        "max_num_seqs": scale.batches[-1],
        "max_num_batched_tokens": BUDGET,
        "enable_prefix_caching": False,
    }
    try:
        with session(bench.folder(shape), bench.device, **shared, **settings) as opened:
            for batch in _batches(scale):
                prompt = prompt_length(scale, batch)
                running = opened.fill(batch, prompt, longest - prompt)
                found.append(opened.steady(batch, scale.warm, scale.windows, scale.steps).rates)
                opened.clear(running)
    except ConfigError as error:
        raise NotHere(str(error)) from error
    return found
