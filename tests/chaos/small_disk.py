"""A disk of a few megabytes that a test can fill, where it may mount one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PAGE = 4096


class SmallDisk:
    """A tmpfs at `folder` while it is entered. Raises `OSError` where none can be mounted."""

    def __init__(self, folder: Path, size: int = 64 << 20) -> None:
        self.folder = folder
        self._size = size
        self._ballast = folder / "ballast"

    def __enter__(self) -> SmallDisk:
        self.folder.mkdir()
        mount = ("mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self.folder))
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip())
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(("umount", "--lazy", str(self.folder)), check=True)

    def fill(self, room: int) -> None:
        """Leave `room` bytes, in whole pages."""
        usage = os.statvfs(self.folder)
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(PAGE, usage.f_bavail * usage.f_frsize - room // PAGE * PAGE))

    def empty(self) -> None:
        """Give back what `fill` took."""
        self._ballast.unlink(missing_ok=True)
