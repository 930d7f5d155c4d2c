"""From settings to keys."""

from __future__ import annotations

from pathlib import Path

from cluster.tenants.key_file import KeyFile
from cluster.tenants.keys import FixedKeys, KeyEntry, KeySource, hash_key
from cluster.tenants.tenant import DEFAULT_TENANT, Tenant


def keys_for(api_key: str | None, api_key_file: str | None) -> KeySource | None:
    """Return the keys of `--api-key` and `--api-key-file`, None when neither is given: the server is open then.

    Raises `ConfigError` that names file and line.
    """
    own = [] if api_key is None else [KeyEntry(hash_key(api_key), Tenant(DEFAULT_TENANT))]
    if api_key_file is not None:
        return KeyFile(Path(api_key_file), own)
    return FixedKeys.one(api_key) if api_key is not None else None
