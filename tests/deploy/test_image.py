"""The image's recipe: what the chart takes for granted of it, and what its steps ask for. Building it needs more."""

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deploy" / "Dockerfile"
STEPS = ROOT / "deploy" / "image" / "install.sh"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHART = ROOT / "helm" / "squadron"


def instructions():
    """Return the recipe's instructions: (name in capitals, the rest of the joined lines)."""
    lines = [line for line in RECIPE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def stages():
    """Return each stage's name -> what it is made from, in order, `ARG`s filled in."""
    defaults = dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG" and "=" in rest)
    found = {}
    for name, rest in instructions():
        if name == "FROM":
            base, stage = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            found[stage] = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], base)
    return found


def of_stage(wanted):
    """Return the instructions of one stage, those of the stages that it is made from before them."""
    own, inside = [], False
    for name, rest in instructions():
        if name == "FROM":
            inside = rest.endswith(f" AS {wanted}")
        elif inside:
            own.append((name, rest))
    base = stages()[wanted]
    return (of_stage(base) if base in stages() else []) + own


def environment(stage):
    """Return the variables of a stage."""
    pairs = [pair for name, rest in of_stage(stage) if name == "ENV" for pair in rest.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def test_bases_are_pinned_to_a_version():
    bases = [base for base in stages().values() if base not in stages()]
    assert len(bases) == 1
    for base in bases:
        assert re.search(r":\d+\.\d+", base), f"{base} moves by itself"


def test_both_targets_are_there_and_the_small_one_is_the_default():
    assert {"cpu", "cuda"} <= set(stages())
    assert list(stages())[-1] == "cpu"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_runs_as_the_user_of_the_charts_pods(target):
    values = yaml.safe_load((CHART / "values.yaml").read_text())["security"]
    users = [rest for name, rest in of_stage(target) if name == "USER"]
    assert users[-1] == f"{values['runAsUser']}:{values['runAsGroup']}"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_writes_where_the_chart_mounts_volumes(target):
    pod = (CHART / "templates" / "_pod.tpl").read_text()
    mounted = re.findall(r"mountPath: (\S+?)[,}]", pod)
    found = environment(target)
    assert {found["HOME"], found["HF_HOME"]} <= set(mounted)
    assert found["PYTHONDONTWRITEBYTECODE"] == "1", "the root is read-only"


def test_its_python_is_one_that_the_project_takes():
    (package,) = {match for _, rest in of_stage("runtime") for match in re.findall(r"python(3\.\d+)(?= )", rest)}
    assert package in SpecifierSet(PROJECT["project"]["requires-python"])


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_login_shell_finds_the_commands_too(target):
    profile = next(rest for name, rest in of_stage(target) if name == "RUN" and "profile.d" in rest)
    first = environment(target)["PATH"].split(":")[0]
    assert f"PATH={first}:" in profile
    copied = [rest for name, rest in of_stage(target) if name == "COPY"]
    assert copied == [f"--from={target}-packages /opt/squadron /opt/squadron"]
    assert first == "/opt/squadron/bin"


def test_all_that_is_installed_reaches_the_build():
    lines = (RECIPE.with_name("Dockerfile.dockerignore")).read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    named = {PROJECT["project"]["readme"], "pyproject.toml", "constraints.txt", "LICENSE"}
    assert kept == packages | named
    assert not any(fnmatch("deploy/image/install.sh", line) for line in lines if line not in ("*", ""))


def installed(tmp_path, *arguments, **variables):
    """Run a step with stand-ins for uv and pip; return what these were called with."""
    for name in ("uv", "pip"):
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n')
        stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run([STEPS, *arguments], check=True, env={"PATH": path, **variables}, timeout=30)
    return (tmp_path / "calls").read_text().splitlines()


def test_packages_are_those_of_the_constraints_for_the_backend_that_was_named(tmp_path):
    calls = installed(tmp_path, "packages", TORCH="cu130")
    assert calls[0] == (
        "uv pip install --torch-backend cu130 --constraint constraints.txt --requirement pyproject.toml "
        "--extra data --extra otel"
    )
    assert all("--constraint constraints.txt" in call for call in calls)


def test_without_a_backend_the_index_that_is_set_has_the_word(tmp_path):
    calls = installed(tmp_path, "packages", TORCH="")
    assert not any("torch-backend" in call for call in calls)


def test_the_image_for_gpus_compiles_nothing_and_finds_infiniband():
    """Kernels are Triton's, compiled for the GPU at hand: there is no list of GPUs that a new one is not in."""
    text = RECIPE.read_text()
    assert "flash" not in text.lower()
    assert "ARCHS" not in text
    (command,) = [rest for name, rest in of_stage("cuda") if name == "RUN" and "libibverbs1" in rest]
    assert "ibverbs-providers" in command
    assert not any("ibverbs" in rest for name, rest in of_stage("cpu") if name == "RUN")


def test_the_chart_asks_for_the_tags_that_the_recipe_names():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for target, tag in (("cpu", version), ("cuda", f"{version}-cuda")):
        assert f"--target {target} --tag squadron:{tag} ." in RECIPE.read_text()
