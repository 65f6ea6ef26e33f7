#!/usr/bin/env bash
# Predicted and measured peaks side by side on the GPU of this machine: one command, from a fresh checkout.
#
#     benchmarks/on_gpu.sh                 writes benchmarks/data/gpu.json and prints the table
#     benchmarks/on_gpu.sh --device cuda:1 --only gpt2
#
# Takes the torch of the environment that is active, or installs gradplan and torch into .venv-gpu.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if ! "$python" -c 'import gradplan, torch' 2>/dev/null; then
  test -d .venv-gpu || python3 -m venv .venv-gpu
  python=.venv-gpu/bin/python
  "$python" -m pip install --quiet .
fi
exec "$python" benchmarks/on_gpu.py "$@"
