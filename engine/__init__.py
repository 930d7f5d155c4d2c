"""One model on one group of workers: scheduler, KV blocks, inputs, models, attention, sampling.

Runs on a bare machine with torch, transformers, safetensors, tokenizers and numpy; never imports Ray.

    from engine import LLM, SamplingParams

Offline generation needs no more than the names here. Each is imported at its first use: parts that know no tensors,
such as the scheduler, load without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
    from engine.sampling_params import SamplingParams, StructuredOutput, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "StructuredOutputsParams",
]

_MODULES = {
    "LLM": "engine.llm",
    "CompletionOutput": "engine.outputs",
    "EmbeddingOutput": "engine.outputs",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.sampling_params",
    "StructuredOutput": "engine.sampling_params",
    "StructuredOutputsParams": "engine.sampling_params",
}

if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
