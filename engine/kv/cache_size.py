"""How many blocks of the key-value cache fit: what memory gives, and what a context needs. Needs no torch."""

from __future__ import annotations

import logging

from engine.config import EngineConfig
from engine.device.machine import free_memory
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

CPU_SHARE = 4  # without a setting, one part in this many of the free memory
CPU_MOST = 4 << 30  # bytes, likewise
LEAST_CONTEXT = 512  # tokens; a context that was not asked for is not lowered below this


def cpu_budget(config: EngineConfig) -> int:
    """Return the bytes of one rank's cache on CPU: the setting, or a share of what is free."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    return min(free_memory() // CPU_SHARE, CPU_MOST) // config.tensor_parallel_size


def memory_share(config: EngineConfig) -> float:
    """Return the share of a GPU's memory that the engine may use.

    Where `kv_cache_memory_bytes` is set, `gpu_memory_utilization` does not count, as in vLLM.
    """
    return 1.0 if config.kv_cache_memory_bytes is not None else config.gpu_memory_utilization


def gpu_budget(config: EngineConfig, total: int, free: int, peak: int, current: int) -> int:
    """Return the bytes that a GPU of `total` bytes can give to one rank's cache; negative where it has none.

    free: bytes that are not used. peak, current: most and present bytes of the engine's own.
    """
    return int(total * memory_share(config)) - (total - free) - peak + current


def given_budget(config: EngineConfig, room: int) -> int:
    """Return the bytes of one rank's cache: those that are set, or all of `room`, what the fullest device can give.

    Raises `ConfigError` where more are set on a GPU than it has room for; on a CPU the kernel decides.
    """
    given = config.kv_cache_memory_bytes
    if given is None:
        return room
    if not config.on_cpu and given > room:
        works = f"lower it to {room}" if room > 0 else "use a larger GPU, or more with tensor_parallel_size"
        raise ConfigError(
            f"kv_cache_memory_bytes={given} is more than the {max(room, 0)} bytes that weights and a step leave of "
            f"the GPU; {works}",
            "kv_cache_memory_bytes",
        )
    return given


def fit_states(config: EngineConfig, state_bytes: int, budget: int | None) -> tuple[EngineConfig, int]:
    """Return the config with `num_state_snapshots` set, and what all slots of recurrent states take of the budget.

    state_bytes: of one sequence's state on one rank, 0 = the model keeps none. budget: bytes for blocks and states;
    None = it is not known, as the number of blocks was given. Snapshots get a quarter of what the states of running
    sequences leave, and are no more than those. Raises `ConfigError` naming the flag that helps.
    """
    if not state_bytes:
        if config.num_state_snapshots is not None:
            raise ConfigError(
                "num_state_snapshots is for models that keep a recurrent state, and this one does not; leave it out",
                "num_state_snapshots",
            )
        return config, 0
    running = (config.max_num_seqs + 1) * state_bytes  # one for steps without sequences
    snapshots = config.num_state_snapshots
    if snapshots is None:
        left = config.max_num_seqs * state_bytes if budget is None else (budget - running) // 4
        snapshots = min(config.max_num_seqs, max(left, 0) // state_bytes) if config.enable_prefix_caching else 0
    taken = running + snapshots * state_bytes
    if budget is not None and taken >= budget:
        fewer = budget // 2 // state_bytes - 1 - (config.num_state_snapshots or 0)
        lower = f"lower max_num_seqs to {fewer}" if fewer > 0 else "raise the memory of the cache"
        raise ConfigError(
            f"the recurrent states of max_num_seqs={config.max_num_seqs} sequences and {snapshots} snapshots take "
            f"{taken} bytes, {state_bytes} each, of the {budget} that the cache has; {lower}",
            "max_num_seqs",
        )
    return config.resolved(num_state_snapshots=snapshots), taken


def fit_cache(config: EngineConfig, blocks: int, bytes_per_block: int, shrink: bool) -> EngineConfig:
    """Return the config with `num_kv_blocks` set, given how many `blocks` (null block included) memory holds.

    On CPU no more are taken than all sequences together can fill. shrink: `max_model_len` was not set, so it may
    be lowered to what fits. Raises `ConfigError` naming the flags that help where one sequence does not fit.
    """
    on_gpu = (config.device or "cpu").startswith("cuda")
    if not on_gpu:
        blocks = min(blocks, config.max_num_seqs * config.max_blocks_per_seq + 1)
    fitted = _fitted(config, blocks, shrink)
    if fitted is not None:
        return fitted
    tokens = (blocks - 1) * config.block_size
    by_share = on_gpu and config.kv_cache_memory_bytes is None
    flag = "gpu_memory_utilization" if by_share else "kv_cache_memory_bytes"
    enough = "" if by_share else f" to {(config.max_blocks_per_seq + 1) * bytes_per_block}"
    lower = f"lower max_model_len to {tokens} or " if tokens > 1 else ""
    raise ConfigError(
        f"the KV cache holds {max(tokens, 0)} tokens, fewer than max_model_len={config.max_model_len}; "
        f"{lower}raise {flag}{enough}",
        "max_model_len" if lower else flag,
    )


def fit_given_blocks(config: EngineConfig, shrink: bool) -> EngineConfig:
    """Return the config, where `num_kv_blocks` was set by somebody, with a `max_model_len` that so many blocks hold.

    shrink: as for `fit_cache`. Raises `ConfigError` naming both flags, and values of them that work.
    """
    blocks = config.num_kv_blocks
    if blocks is None:
        return config
    fitted = _fitted(config, blocks, shrink)
    if fitted is not None:
        return fitted
    tokens = (blocks - 1) * config.block_size
    lower = f" or lower max_model_len to {tokens}" if tokens > 1 else ""
    raise ConfigError(
        f"num_kv_blocks={blocks} holds {tokens} tokens (one block is kept for padding), fewer than "
        f"max_model_len={config.max_model_len}; raise num_kv_blocks to {config.max_blocks_per_seq + 1}{lower}",
        "num_kv_blocks",
    )


def _fitted(config: EngineConfig, blocks: int, shrink: bool) -> EngineConfig | None:
    """Return the config with `blocks` blocks, or None where they hold too little."""
    tokens = (blocks - 1) * config.block_size
    if tokens >= config.context_len:
        return config.resolved(num_kv_blocks=blocks)
    if shrink and tokens >= LEAST_CONTEXT:
        logger.warning("max_model_len lowered from %d to the %d tokens that fit", config.context_len, tokens)
        return config.resolved(num_kv_blocks=blocks, max_model_len=tokens)
    return None
