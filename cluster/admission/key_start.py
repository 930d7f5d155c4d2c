"""From settings to keys."""

from __future__ import annotations

from pathlib import Path

from cluster.admission.key_file import KeyFile
from cluster.admission.keys import FixedKeys, KeyRing, KeySource, admin_entry, scrape_entry


def keys_for(api_key: str | None, api_key_file: str | None, metrics_key: str | None = None) -> KeySource | None:
    """Return the keys of `--api-key`, `--api-key-file` and `--metrics-key`, None without the first two: open to all.

    Raises `ConfigError` that names file and line.
    """
    own = [] if api_key is None else [admin_entry(api_key)]
    if metrics_key is not None:
        own.append(scrape_entry(metrics_key))
    if api_key_file is not None:
        return KeyFile(Path(api_key_file), own)
    return None if api_key is None else FixedKeys(KeyRing(own))
