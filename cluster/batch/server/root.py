"""Where files and batches are kept: a directory, or a URL by fsspec. Paths below it are made of our own ids alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from cluster.batch.errors import InputError
from cluster.batch.server.local_root import LocalRoot
from cluster.batch.server.url_root import UrlRoot
from cluster.batch.sources.found import file_system, is_url, local_path
from engine.errors import ConfigError

FLAG = "batch_dir"


class Draft(Protocol):
    """A file that is being written, which nobody sees. Of one thread at a time; ends with `put` or `discard`.

    One that got no byte for two hours is taken for what a killed process left, and may be removed.
    """

    @property
    def size(self) -> int:
        """Bytes so far."""
        ...

    def write(self, data: bytes, /) -> int:
        """Take them all; return how many. Raises `OSError`."""
        ...

    def put(self, path: str) -> None:
        """Put it in place: there and whole, or not there. Raises `OSError`."""
        ...

    def discard(self) -> None:
        """Remove it, unless it is in place. Can be called twice."""
        ...


class Root(Protocol):
    """All methods block, may be called from any thread, and raise `OSError`. Paths have `/` between names."""

    def read(self, path: str) -> bytes | None:
        """Return what a small file holds, None where there is none."""
        ...

    def read_all(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return what small files hold, in their order."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Put a small file in place, over another one if there is one: readers see either whole."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Put a small file in place where there is none, and return whether what lies there now is `data`.

        Of several that create one file, one alone is told True. On a disk, on NFS, and where the store takes
        conditional writes (Amazon S3, Google Cloud Storage, Azure Blob Storage) that is certain; elsewhere (sftp,
        hdfs) two that do so within one round trip may both be told True, and what came last stays.
        """
        ...

    def draft(self) -> Draft:
        """Begin a large file."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading; raises `FileNotFoundError`."""
        ...

    def place(self, path: str) -> str:
        """Return where a file lies, for those who open it themselves: an absolute path, or a URL."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder, in any order; none where there is no such folder."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing where there is neither."""
        ...

    def sweep(self) -> None:
        """Remove the drafts that killed processes left."""
        ...


def open_root(place: str) -> Root:
    """Return the root at an absolute path or a URL, made if need be. Raises `ConfigError` naming the setting."""
    try:
        if is_url(place):
            root = UrlRoot(*file_system(place))
            root.names("files")  # it is there, and opens to us
            return root
        path = Path(local_path(place))
        if not path.is_absolute():
            raise ConfigError(
                f"{FLAG}: must be an absolute path or a URL, such as /var/lib/squadron, not {place!r}", FLAG
            )
        return LocalRoot(path)
    except InputError as error:
        raise ConfigError(f"{FLAG}: {error}", FLAG) from error
    except OSError as error:
        raise ConfigError(f"{FLAG}: {place} cannot be used: {error.strerror or error}", FLAG) from error
