"""Where a server keeps files and batches: meant from here, wherever its routers run."""

from __future__ import annotations

from pathlib import Path

from cluster.app_config import AppConfig
from cluster.batch.sources.found import is_url, local_path


def with_batch_dir(app: AppConfig) -> AppConfig:
    """Return `app` with the path of its `--batch-dir` made absolute, if it has one that is no URL."""
    place = app.shared.batch_dir
    if place is None or is_url(place):
        return app
    return app.with_shared(batch_dir=str(Path(local_path(place)).absolute()))
