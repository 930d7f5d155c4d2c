"""A folder of its own for each client: a virtual environment, or an npm project. They are kept from run to run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.clients.catalogue import Client

INSTALL_TIMEOUT = 1800.0  # seconds; the largest of them takes some minutes where disk and cores are busy


class NotInstallableError(Exception):
    """A client did not install; the words say why."""


def install(client: Client, cache: Path) -> Path:
    """Install what a client needs, unless it lies there, and return its folder.

    Raises `NotInstallableError` with the installer's own words.
    """
    folder = cache / client.name
    stamp, wanted = folder / "installed.json", list(client.packages)
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return folder
    if client.is_javascript:
        _npm(folder, wanted)
    else:
        _pip(folder, wanted)
    stamp.write_text(json.dumps(wanted))
    return folder


def command(client: Client, folder: Path, scripts: Path) -> list[str]:
    """Return what runs a client's script: its interpreter and the script.

    Node looks for packages beside the script, so the scripts in JavaScript are copied to their packages.
    """
    if not client.is_javascript:
        return [str(folder / "bin" / "python"), str(scripts / client.script)]
    for script in scripts.glob("*.mjs"):
        shutil.copy(script, folder)
    return ["node", str(folder / client.script)]


def _pip(folder: Path, packages: Sequence[str]) -> None:
    # Without a pip of its own, which takes longest to install: ours installs into it.
    venv.create(folder, clear=True, with_pip=False)
    python = str(folder / "bin" / "python")
    _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", *packages], folder)


def _npm(folder: Path, packages: Sequence[str]) -> None:
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise NotInstallableError(f"{program} is not installed here")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    _run(["npm", "install", "--no-audit", "--no-fund", "--save-exact", *packages], folder)


def _run(arguments: Sequence[str], folder: Path) -> None:
    try:
        subprocess.run(arguments, cwd=folder, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise NotInstallableError(f"not done after {INSTALL_TIMEOUT:g} s") from error
    except subprocess.CalledProcessError as error:
        raise NotInstallableError(_reason(error.stderr)) from error


def _reason(said: str) -> str:
    """Return the line in which pip or npm says what is wrong, or else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # pip says it last, but for where to read of conflicts; npm says it first, after a code.
    pips = [line for line in lines if line.startswith("ERROR") and "for help visit" not in line]
    npms = [line for line in lines if line.startswith("npm error") and not line.startswith("npm error code")]
    return npms[0] if npms else ["it said nothing", *lines, *pips][-1]
