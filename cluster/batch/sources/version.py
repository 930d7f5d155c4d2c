"""What tells that a file was written to, as far as its file system says."""

from __future__ import annotations

import os
from collections.abc import Hashable

from cluster.batch.sources.found import InputFile, file_system
from cluster.batch.sources.reading import unreadable

# By fsspec's file systems, in lower case. No time of access is among them, which reading changes.
TELLING = frozenset(
    {
        "size",
        *("etag", "md5hash", "content-md5", "crc32c", "digest", "sha", "generation"),
        *("mtime", "modified", "last_modified", "lastmodified", "last_write_time", "modificationtime", "modify"),
        *("updated", "created"),
    }
)


def version_of(file: InputFile) -> Hashable:
    """Return what is another value once a file was written to.

    Of local files size and time of change, behind a URL what there is of `TELLING`. Raises `InputError` when the file
    is gone, `UnreachableError` when it cannot be looked at.
    """
    try:
        return _told_by_url(file.path) if file.is_url else _told_here(file.path)
    except OSError as error:
        raise unreadable(file, error) from error


def _told_here(path: str) -> Hashable:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _told_by_url(url: str) -> Hashable:
    files, path = file_system(url)
    files.invalidate_cache()  # else it may tell what it was told before
    told = files.info(path)
    return tuple((name, str(told[name])) for name in sorted(told) if name.lower() in TELLING)
