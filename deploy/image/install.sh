#!/bin/sh
# Steps of the image's build, in the folder with pyproject.toml and constraints.txt; uv installs into $VIRTUAL_ENV.
#
#     install.sh packages          what the project needs, without the project: this layer outlives changes of code
#     install.sh project           the project itself
#
# TORCH: backend that torch is installed for, as uv's --torch-backend; empty = torch as the index has it.
set -eu

install() {
  uv pip install ${TORCH:+--torch-backend "$TORCH"} --constraint constraints.txt "$@"
}

packages() {
  install --requirement pyproject.toml --extra data --extra otel
  # xgrammar asks for triton, a gigabyte for a kernel that is not used here.
  install --no-deps xgrammar apache-tvm-ffi
}

project() {
  install --no-deps .
}

"$@"
