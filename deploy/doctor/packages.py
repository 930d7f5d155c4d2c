"""Whether what is installed is what Squadron asks for, and nothing hides it."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from deploy.doctor.checks import Finding, fix, ok, warning

OURS = ("parallel", "engine", "cluster", "deploy")
DISTRIBUTION = "squadron"
NAMED = ("ray", "torch", "transformers")  # their versions get a line of their own
# From its folder: the name on the public index belongs to another project.
REINSTALL = "pip install --force-reinstall --no-deps . in Squadron's folder"


def check_versions() -> list[Finding]:
    """Check Python and every package that this installation asks for."""
    try:
        facts = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return [
            warning(
                DISTRIBUTION,
                "it is not installed, so nothing says which versions it needs",
                "pip install . in Squadron's folder",
            )
        ]
    asked = str(facts["Requires-Python"] or "")
    needs = metadata.requires(DISTRIBUTION) or []
    return [
        ok(DISTRIBUTION, metadata.version(DISTRIBUTION)),
        python_version(platform.python_version(), asked),
        *package_versions(needs, metadata.version),
    ]


def python_version(running: str, asked: str) -> Finding:
    """Compare the interpreter with what is asked for, such as `>=3.11`."""
    if SpecifierSet(asked).contains(running, prereleases=True):
        return ok("python", f"{running} (asked for: {asked or 'any'})")
    return fix("python", f"{running}, but {asked} is asked for", f"make an environment with Python {asked}")


def package_versions(needs: Iterable[str], version_of: Callable[[str], str]) -> list[Finding]:
    """Compare packages with requirements as metadata has them; those of extras are passed over.

    version_of: raises `PackageNotFoundError` for what is not installed.
    """
    findings, quiet = [], 0
    for text in needs:
        try:
            need = Requirement(text)
        except InvalidRequirement:
            findings.append(warning("packages", f"the requirement {text!r} cannot be read", REINSTALL))
            continue
        # Ones with an extra are for those who asked for the extra.
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        found = _package(need, version_of)
        if found.level == "ok" and need.name not in NAMED:
            quiet += 1
        else:
            findings.append(found)
    return [*findings, ok("packages", f"{quiet} more are as asked for")]


def _package(need: Requirement, version_of: Callable[[str], str]) -> Finding:
    remedy = f"pip install '{need.name}{_extras(need)}{need.specifier}'"
    try:
        version = version_of(need.name)
    except metadata.PackageNotFoundError:
        return fix(need.name, f"not installed, but {need.specifier or 'any version'} is asked for", remedy)
    try:
        fits = need.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return warning(need.name, f"version {version!r} cannot be compared with {need.specifier}", remedy)
    if not fits:
        return fix(need.name, f"{version}, but {need.specifier} is asked for", remedy)
    return ok(need.name, f"{version} (asked for: {need.specifier or 'any'})")


def _extras(need: Requirement) -> str:
    return f"[{','.join(sorted(need.extras))}]" if need.extras else ""


def check_shadowed() -> list[Finding]:
    """Check whether `import engine` and the like find this installation, and which other package they could find."""
    home = Path(__file__).resolve().parents[2]
    return shadowed(metadata.packages_distributions(), {name: _place(name) for name in OURS}, home)


def shadowed(owners: Mapping[str, Iterable[str]], places: Mapping[str, Path | None], home: Path) -> list[Finding]:
    """Return what else provides our packages.

    owners: package -> distributions that install it. places: package -> the folder that holds what an import finds,
    None where nothing is found. home: the folder that holds ours.
    """
    findings = []
    for name, place in places.items():
        others = sorted({owner for owner in owners.get(name, ()) if _plain(owner) != DISTRIBUTION})
        if others:
            findings.append(
                fix(
                    "shadowed",
                    f"{', '.join(others)} installs a package {name!r} too",
                    f"pip uninstall {' '.join(others)}, then {REINSTALL}",
                )
            )
        elif place != home:
            where = f"in {place}" if place else "nowhere"
            findings.append(
                fix(
                    "shadowed",
                    f"`import {name}` finds it {where}, not in {home}",
                    f"leave out of PYTHONPATH, and do not work in, a folder with a {name!r} of its own",
                )
            )
    return findings or [ok("shadowed", f"{', '.join(places)} are Squadron's own, in {home}")]


def _place(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    places = list(found.submodule_search_locations or []) if found else []
    return Path(places[0]).resolve().parent if places else None


def _plain(name: str) -> str:
    """Return a distribution's name as the index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()
