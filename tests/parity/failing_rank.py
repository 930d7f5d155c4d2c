"""A worker that fails at once, in a module that is quick to import."""

from engine.errors import ConfigError


def run(rank, *args):
    raise ConfigError("raise kv_cache_memory_bytes", "kv_cache_memory_bytes")
