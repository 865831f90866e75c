#!/usr/bin/env bash
# Runs the tests: unit tests file by file on several cores, then functional tests, two files at a time. Each of those
# starts processes of its own, which wait for each other. At last one at a time the files whose tests judge how fast a
# process is, or wait for Slurm.
#
# Without --full, tests that are marked `full` are left out; with it, property tests draw new examples, and more.
#
# A worker that crashes ends its part as failed: with another one in its place pytest-xdist may wait forever.
#
# usage: run_tests.sh [--full] PYTHON [arguments of pytest for all parts]
set -uo pipefail
tier=(-m "not full")
if [[ "$1" == --full ]]; then
    tier=(--hypothesis-profile explore)
    shift
fi
python="$1"
shift
status=0
ran=0

run() {
    local code=0
    "${python}" -m pytest "${tier[@]}" "$@" || code=$?
    # 5: the arguments leave no test of this part.
    if [[ ${code} -ne 5 ]]; then
        ran=1
    fi
    if [[ ${code} -ne 0 && ${code} -ne 5 ]]; then
        status=${code}
    fi
}

run tests/unit --numprocesses auto --maxprocesses 4 --dist loadfile --max-worker-restart 0 "$@"
if [[ ${status} -eq 2 ]]; then # interrupted
    exit 2
fi
# These judge speed, or wait for what Slurm's daemons do in time.
alone=(tests/functional/test_{doctor,elastic_drift,watch,elastic_slurm,emit_slurm,init_slurm}.py)
run tests/functional "${alone[@]/#/--ignore=}" --numprocesses auto --maxprocesses 2 --dist loadfile --max-worker-restart 0 "$@"
if [[ ${status} -eq 2 ]]; then
    exit 2
fi
run "${alone[@]}" "$@"
if [[ ${ran} -eq 0 ]]; then
    echo "No test was run" >&2
    exit 5
fi
exit "${status}"
