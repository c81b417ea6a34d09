#!/usr/bin/env bash
# compute-sanitizer's memcheck and racecheck over a small run of every kernel. Where the tool is not
# installed or cannot attach, this says so and fails; the guards in tests/pallas/test_gpu.py stand in.
# TOOLS=racecheck runs one of the two.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1 || true)}
if [[ -z $sanitizer ]]; then
    echo "compute-sanitizer is not installed here: nothing was checked. The wheel nvidia-cuda-sanitizer-api"
    echo "(13.5; older ones lack a part of it) has it: SANITIZER=.../compute-sanitizer make gpu-sanitize"
    exit 2
fi

for tool in ${TOOLS:-memcheck racecheck}; do
    echo "== $tool"
    # XLA's own allocator hands out pieces of one large block, past whose ends memcheck cannot see.
    # Its search for tiles of its own products would run hundreds of kernels under the tool.
    XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS=--xla_gpu_autotune_level=0 PYTHONPATH=. \
        "$sanitizer" --tool "$tool" --error-exitcode 1 --launch-timeout 120 \
        "$python" tests/support/run_kernels.py
done
