"""With a read-only root, what libraries and Ray write goes into volumes, whatever the image would have them do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.helm.rendered import ROOT, clusters, rendered

# What an image made for a root that can be written to may set.
OF_AN_IMAGE = (
    "HOME", "TMPDIR", "RAY_TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "NUMBA_CACHE_DIR",
    "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH",
    "TVM_FFI_CACHE_DIR",
)  # fmt: skip
ASKED = """
import importlib.util, json, os, tempfile
from huggingface_hub import constants
from ray._common.utils import get_default_system_temp_dir
from torch import hub
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.cpp_extension import get_default_build_root
from parallel.c_library import cache_folder

told = [tempfile.gettempdir(), get_default_system_temp_dir(), constants.HF_HUB_CACHE, constants.HF_XET_CACHE]
told += [hub.get_dir(), cache_dir(), get_default_build_root(), str(cache_folder("kernels"))]
if importlib.util.find_spec("triton"):
    from triton import knobs
    told.append(knobs.cache.dir)
if importlib.util.find_spec("matplotlib"):
    import matplotlib
    told += [matplotlib.get_cachedir(), matplotlib.get_configdir()]
print(json.dumps(told))
"""


def test_libraries_write_into_volumes(helm4, tmp_path):
    (cluster,) = clusters(rendered("one-gpu"))
    (container,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    mounts = [one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")]
    for number, mount in enumerate(mounts):
        here = tmp_path / str(number)
        here.mkdir()
        lies_there = {name: value for name, value in given.items() if within(value, mount)}
        given |= {name: str(here) + value[len(mount) :] for name, value in lies_there.items()}
    environment = os.environ | dict.fromkeys(OF_AN_IMAGE, "/opt/image/cache") | given | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    folders = json.loads(done.stdout.splitlines()[-1])
    assert len(folders) >= 8
    assert [folder for folder in folders if not within(folder, str(tmp_path))] == []
    assert given["PYTHONDONTWRITEBYTECODE"] == "1"


def test_every_container_of_ray_has_these_folders(helm4):
    for cluster in clusters(rendered("everything")):
        for pod in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
            spec = pod["template"]["spec"]
            of_ray = [one for one in spec.get("initContainers", []) if one["name"] == "fetch-models"]
            for container in [*of_ray, spec["containers"][0]]:
                given = {one["name"]: one.get("value", "") for one in container["env"]}
                mounts = [one["mountPath"] for one in container["volumeMounts"]]
                for name in OF_AN_IMAGE:
                    assert any(within(given[name], mount) for mount in mounts), name


def within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")
