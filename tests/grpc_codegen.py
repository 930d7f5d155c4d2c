"""Makes the Python code of the gRPC interface from its `.proto`: `python -m tests.grpc_codegen`.

protoc's modules import each other as `squadron.v1`, the path of the `.proto`; here they live in `cluster.grpc_api`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "cluster" / "grpc_api"
PROTO = "squadron/v1/inference.proto"
NAMES = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")
PLACES = (
    ("from squadron.v1 import", "from cluster.grpc_api.squadron.v1 import"),
    ("'squadron.v1.inference_pb2'", "'cluster.grpc_api.squadron.v1.inference_pb2'"),
)


def generate(into: Path) -> None:
    """Write the modules to `into`/squadron/v1."""
    kinds = [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *kinds, PROTO], check=True)
    for name in NAMES:
        path = into / "squadron" / "v1" / name
        code = path.read_text()
        for before, after in PLACES:
            code = code.replace(before, after)
        path.write_text(code)


if __name__ == "__main__":
    generate(ROOT)
