#!/usr/bin/env bash
# Runs the unit tests and a training under every schedule with another version of torch than the pinned one.
#
# usage: test_torch.sh VERSION [arguments of pytest]
set -euo pipefail
version="${1:?usage: test_torch.sh VERSION [arguments of pytest]}"
shift
cd "$(dirname "$0")/.."
if [[ ! "${version}" =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]]; then
    echo "TORCH: '${version}' is not a version; write one such as 2.11.0" >&2
    exit 2
fi
venv=".venv-torch-${version}"
TORCH="${version}" scripts/make_venv.sh "${venv}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
status=0
"${venv}/bin/python" -m pytest tests/unit -m "not full" --numprocesses auto --maxprocesses 4 --dist loadfile \
    --max-worker-restart 0 "$@" || status=$?
# Every case trains, and its dry run on fake tensors gives the same figures; then one training of each kind of numerics.
"${venv}/bin/python" -m pytest tests/functional/test_dry_run.py tests/functional/test_parity.py \
    tests/functional/test_slimpipe.py tests/functional/test_ministage.py tests/functional/test_zero_bubble.py \
    -k "test_equals_a_real_run or (test_equals_one_process and (replicas or split-tied or fp32-12 or v-half-mixed))" \
    --max-worker-restart 0 "$@" || status=$?
exit "${status}"
