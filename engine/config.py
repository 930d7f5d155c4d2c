"""One frozen configuration of the engine. Field names are vLLM's flags with underscores."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.device.topology import format_cpus, parse_cpus
from engine.errors import ConfigError
from engine.sampling_params import ALL_LOGPROBS, MAX_LOGPROBS
from engine.short_numbers import context_length, short_number

DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")
QUANTIZATIONS = ("fp8", "int8", "int4", "compressed-tensors", "gptq", "awq", "modelopt", "mxfp4")
USUAL_GROUP = 128  # inputs that share a scale in int4
LEAST_GROUP = 8  # of fewer the scales would be larger than the weights
GPU_TOKENS, CPU_TOKENS = 8192, 2048  # of a step, unless told
DEVICES = ("cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
SCHEDULING_POLICIES = ("fcfs", "priority")
MODEL_IMPLS = ("auto", "native", "transformers")
AUTO, NOBIND = "auto", "nobind"  # of cpu_omp_threads_bind, which may be a list, too
ATTENTION_BACKENDS = ("auto", "reference", "native", "flash", "triton", "torch_varlen")
# vLLM's names of values that are there, as its users type them: of its kernels, too, which are chosen here.
VLLMS_VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "attention_backend": {"FLASH_ATTN": "flash", "TRITON_ATTN": "triton", "CPU_ATTN": "native"},
    "quantization": {
        "awq_marlin": "awq",
        "gptq_marlin": "gptq",
        "modelopt_fp4": "modelopt",
        "modelopt_mixed": "modelopt",
        "gpt_oss_mxfp4": "mxfp4",
    },
}
LEAST = {
    **dict.fromkeys(("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"), 1),
    **dict.fromkeys(("max_model_len", "num_kv_blocks"), 2),
    **dict.fromkeys(("long_prefill_token_threshold", "num_state_snapshots"), 0),
    "state_snapshot_blocks": 1,
    "max_logprobs": ALL_LOGPROBS,
}
MOST = {"max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 24, "block_size": 1 << 16}  # arrays are made for all
# What reads numbers that people write as 32k.
SHORT: Mapping[str, Callable[[Any], Any]] = {
    "max_model_len": context_length,
    "max_num_batched_tokens": short_number,
    "kv_cache_memory_bytes": short_number,
}
# What fields of a type take, and how that is said.
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine runs and how much it may use; checked on construction.

    model: local folder or hub id, downloaded unless it is cached; `tokenizer=None` means the model's own.
    revision: branch, tag or commit of a hub id; None = its main branch. Of a tokenizer: `tokenizer="NAME@REVISION"`.
    hf_overrides: what the checkpoint's config.json is to say instead, a JSON object or a mapping: its values replace
    those of the file, and within the config of a text half those of that. It is part of what the model is.
    model_impl: "native" = this engine's own layers, "transformers" = those of the transformers library over this
    engine's products, attention and cache; "auto" = native where there is a family for the architecture.
    enable_expert_parallel: each rank holds some experts of a layer whole, and rows are sent to the ranks of their
    experts; else each rank holds a part of all experts.
    device: "cpu", "cuda" or None for cuda where there is one.
    quantization: how linear layers hold their weights: "fp8" (with activations, on a GPU), "int8" or "int4", made as
    plain weights are loaded; None = as the checkpoint has them, which "compressed-tensors", "gptq", "awq", "modelopt"
    and "mxfp4" name and, of a quantised checkpoint, "fp8".
    quantization_group_size: inputs of an output that share a scale in int4; None = 128. Fewer are more exact and take
    more memory: 2 to 4 bytes a group.
    quantize_lm_head: hold the output head in int8, made as it is loaded, whatever the other layers are; on CPUs.
    max_model_len: tokens of prompt + output of one sequence; None = the model's own limit.
    max_num_seqs / max_num_batched_tokens: sequences and tokens of one step; None = `token_budget`, what is usual for
    the device.
    long_prefill_token_threshold: most prompt tokens one sequence may take in a step; 0 = the whole budget.
    num_kv_blocks: KV blocks incl. the null block; None = from memory.
    gpu_memory_utilization: share of the GPU's memory that the engine may use.
    kv_cache_memory_bytes: bytes of KV cache per rank, on a GPU in the place of what `gpu_memory_utilization` leaves;
    None = that, and on a CPU a quarter of the free memory, at most 4 GiB.
    kv_cache_dtype: "auto" = that of the weights; "fp8" and "fp8_e4m3" are the same, half of 16 bits.
    state_snapshot_blocks: a snapshot of a sequence's recurrent state is taken every so many blocks: prefixes of such
    a model are found in these steps, and no chunk of a prompt crosses one.
    num_state_snapshots: snapshots that are kept beside the states of running sequences, each the size of one; 0 =
    no prefix of a model with recurrent states is found; None = from memory, at most `max_num_seqs`.
    cudagraph_capture_sizes: padded batch sizes in which decode steps on CUDA are replayed, all captured at start;
    None = 1, 2, 4, 8, 16, 24, ... up to `max_num_seqs` and 512, some of them captured when they are needed.
    max_logprobs: most tokens whose log-probabilities a request may ask for at each position; -1 = all there are.
    attention_backend: "reference" keeps products, norms, rotation and gating to torch's operations too, where "auto"
    takes what is compiled for this CPU, or Triton's kernels on CUDA.
    batch_invariant: the bits of a token do not depend on what else is in its steps; slower on a GPU.
    async_scheduling: plan and launch a step while the one before it runs; None = on with CUDA, off on CPU, where host
    and model share the cores.
    cpu_omp_threads_bind: where the threads of a rank on a CPU run, as vLLM's VLLM_CPU_OMP_THREADS_BIND: "auto" = on
    physical cores that no other rank of this machine has, of one NUMA node where they fit; "nobind" = where the
    kernel puts them; or CPUs by number, those of different ranks separated by "|", of which each rank takes the
    first group that no other has, and computes with as many threads.
    step_timeout: seconds after which a step or a collective counts as hung.

    Raises `ConfigError` naming the flag.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    hf_overrides: str | None = None
    model_impl: str = "auto"
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    dtype: str = "auto"
    quantization: str | None = None
    quantization_group_size: int | None = None
    quantize_lm_head: bool = False
    device: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    state_snapshot_blocks: int = 16
    num_state_snapshots: int | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    scheduling_policy: str = "fcfs"
    max_logprobs: int = MAX_LOGPROBS
    attention_backend: str = "auto"
    batch_invariant: bool = False
    async_scheduling: bool | None = None
    cpu_omp_threads_bind: str = NOBIND
    step_timeout: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hf_overrides", _as_json_object("hf_overrides", self.hf_overrides))
        for name, ours in VLLMS_VALUES.items():
            given = getattr(self, name)
            object.__setattr__(self, name, ours.get(given, given) if isinstance(given, str) else given)
        for name, read in SHORT.items():
            try:
                object.__setattr__(self, name, read(getattr(self, name)))
            except ValueError as error:
                raise ConfigError(f"{name} {error}", name) from None
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        if self.cudagraph_capture_sizes is not None:
            object.__setattr__(self, "cudagraph_capture_sizes", self._checked_sizes(self.cudagraph_capture_sizes))
        self._check_ranges()
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _one_of("model_impl", self.model_impl, MODEL_IMPLS)
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        if self.quantization_group_size is not None:
            self._check_group_size(self.quantization_group_size)
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel spreads experts over ranks, and there is one; use tensor_parallel_size=2 or "
                "more, or leave it out",
                "enable_expert_parallel",
            )
        if self.device is not None:
            _one_of("device", self.device.split(":")[0], DEVICES)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "gpu_memory_utilization must be above 0 and at most 1 (0.9 is usual), "
                f"not {self.gpu_memory_utilization}",
                "gpu_memory_utilization",
            )
        _ = self.cpu_groups
        if self.step_timeout <= 0:
            raise ConfigError(f"step_timeout must be above 0 seconds, not {self.step_timeout}", "step_timeout")

    def _check_ranges(self) -> None:
        for name, low in LEAST.items():
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), low)
        for name, high in MOST.items():
            if (getattr(self, name) or 0) > high:
                raise ConfigError(f"{name} must be at most {high}, not {getattr(self, name)}", name)
        _power_of_two("block_size", self.block_size)

    def _checked_sizes(self, sizes: Collection[int]) -> tuple[int, ...]:
        """Return padded batch sizes in order, each once. Raises `ConfigError`."""
        name = "cudagraph_capture_sizes"
        wrong = isinstance(sizes, str) or any(type(size) is not int or size < 1 for size in sizes)
        if wrong or not sizes:
            given = sizes if isinstance(sizes, str) else list(sizes)
            works = "1,2,4,8 as a flag or [1, 2, 4, 8]"
            raise ConfigError(f"{name} must be one or more numbers from 1, such as {works}, not {given!r}", name)
        most = min(self.max_num_seqs, self.token_budget)
        if max(sizes) > most:
            raise ConfigError(
                f"{name} goes up to {max(sizes)}, but max_num_seqs and max_num_batched_tokens let no step have more "
                f"than {most} sequences; leave out what is beyond {most}",
                name,
            )
        if self.enforce_eager:
            raise ConfigError(f"{name} is for CUDA graphs, and enforce_eager for none; drop one of them", name)
        return tuple(sorted(set(sizes)))

    def _check_group_size(self, size: int) -> None:
        name = "quantization_group_size"
        if self.quantization != "int4":
            raise ConfigError(f"{name}={size} is for quantization=int4; give both, or leave it out", name)
        _at_least(name, size, LEAST_GROUP)
        _power_of_two(name, size)

    @property
    def source(self) -> str:
        """Where the checkpoint is: `model`, or `model@revision` for those who read it (`split_revision`)."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def on_cpu(self) -> bool:
        """Whether `device` is a CPU; without a device it is not known yet."""
        return (self.device or "").startswith("cpu")

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, or what is usual: less on a CPU, where a step takes as long as it has tokens."""
        return self.max_num_batched_tokens or (CPU_TOKENS if self.on_cpu else GPU_TOKENS)

    @property
    def weight_form(self) -> str | None:
        """How linear layers hold their weights, None = as they are; another one makes other tokens."""
        group = self.quantization_group_size
        layers = self.quantization if group in (None, USUAL_GROUP) else f"{self.quantization} by {group}"
        if not self.quantize_lm_head:
            return layers
        return "output head in int8" if layers is None else f"{layers}, output head in int8"

    @property
    def cpu_groups(self) -> tuple[tuple[int, ...], ...]:
        """CPUs by number that ranks are to compute on, a group a rank; empty where no list was given."""
        name, given = "cpu_omp_threads_bind", self.cpu_omp_threads_bind
        if given in (AUTO, NOBIND):
            return ()
        try:
            groups = tuple(parse_cpus(group) for group in str(given).split("|"))
        except ValueError:
            raise ConfigError(
                f'{name} must be auto, nobind, or CPUs such as 0-3,8 or, by rank, "0-3|4-7", not {given!r}', name
            ) from None
        cpus = [cpu for group in groups for cpu in group]
        twice = {cpu for cpu in cpus if cpus.count(cpu) > 1}
        if twice:
            raise ConfigError(f"{name}={given} has CPU {format_cpus(twice)} more than once; leave it once", name)
        if len({len(group) for group in groups}) > 1:
            raise ConfigError(f"{name}={given} must have as many CPUs for each rank, such as 0-3|4-7", name)
        return groups

    @property
    def overlaps(self) -> bool:
        """Whether a step is launched before the results of the one before it are known."""
        if self.async_scheduling is not None:
            return self.async_scheduling
        return (self.device or "cpu").startswith("cuda")

    @property
    def fp8_cache(self) -> bool:
        """Whether the KV cache holds float8_e4m3fn."""
        return self.kv_cache_dtype != "auto"

    @property
    def snapshot_interval(self) -> int:
        """Tokens between two snapshots of a recurrent state."""
        return self.state_snapshot_blocks * self.block_size

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of the block table: blocks that hold `max_model_len` tokens."""
        return -(-self.context_len // self.block_size)

    @property
    def context_len(self) -> int:
        """`max_model_len`, which must have been resolved against the model."""
        if self.max_model_len is None:
            raise ConfigError("max_model_len is not resolved yet; call `resolved` first", "max_model_len")
        return self.max_model_len

    def resolved(self, **values: Any) -> EngineConfig:
        """Return a copy with settings that were left open filled in from the model and the machine."""
        return replace(self, **values)


def split_revision(source: str) -> tuple[str, str | None]:
    """Return the id and the revision of `ID@REVISION`; no id of the hub has an @."""
    name, _, revision = source.partition("@")
    return name, revision or None


def config_fields() -> tuple[str, ...]:
    """Names of all settings, in the order of the dataclass."""
    return tuple(f.name for f in fields(EngineConfig))


def _check_type(name: str, value: object, annotation: str) -> None:
    """Raise `ConfigError` where a value is not of the type that a field is declared with."""
    declared, _, optional = annotation.partition(" | ")
    kinds, such_as = TYPES.get(declared, ((object,), ""))
    if (value is None and optional) or (isinstance(value, kinds) and (declared == "bool" or type(value) is not bool)):
        return
    works = " such as 32768 or 32k" if name in SHORT else ""
    raise ConfigError(f"{name} must be {such_as}{works}, not {value!r}", name)


def _as_json_object(name: str, value: object) -> str | None:
    """Return a JSON object as text, keys in order, from a mapping or from text. Raises `ConfigError`."""
    if value is None:
        return None
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if not isinstance(found, Mapping):
            raise ValueError("it is none")
        return json.dumps(found, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} must be a JSON object such as '{{\"rope_theta\": 1000000}}': {error}", name
        ) from None


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, not {value}", name)


def _power_of_two(name: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ConfigError(f"{name} must be a power of two such as 16, not {value}", name)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}", name)
