#!/usr/bin/env bash
# What a machine with 1 or 8 GPUs shows of zero2all, in at most 35 minutes: see docs/evidence/status.md.
#
#   benchmarks/gpu.sh                          # writes gpu-report.md; prints how to send it back
#   benchmarks/gpu.sh --only kernels --only mfu-1b
#   benchmarks/gpu.sh --device cpu --tiny      # the same code with small shapes, on two ranks of a CPU
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../src:$here/..${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks gpu_report "$@"
