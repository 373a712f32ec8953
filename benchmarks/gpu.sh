#!/usr/bin/env bash
# Everything that is to be measured on a GPU, in one run of at most 8 minutes, without downloads:
#
#     benchmarks/gpu.sh [OUT]
#
# builds its models from random weights, measures search, training and publishing against what else
# does the same work, and trains recipe arithmetic with trainer and searcher on one card. Without a
# GPU it does the same at a small size on the CPU. OUT (default: gpu-results) gets results.json,
# report.md and the run.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE PYTHONPATH="$PWD/src:$PWD"
exec "${PYTHON:-python3}" -m benchmarks.gpu --out "${1:-gpu-results}"
