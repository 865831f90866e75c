#!/usr/bin/env bash
# Runs all tests: unit tests file by file on several cores, then functional tests one at a time, since each of those
# starts processes of its own.
#
# usage: run_tests.sh PYTHON [arguments of pytest for both]
set -uo pipefail
python="$1"
shift
status=0
ran=0

run() {
    local code=0
    "${python}" -m pytest "$@" || code=$?
    # 5: the arguments leave no test of this half.
    if [[ ${code} -ne 5 ]]; then
        ran=1
    fi
    if [[ ${code} -ne 0 && ${code} -ne 5 ]]; then
        status=${code}
    fi
}

run tests/unit --numprocesses auto --maxprocesses 4 --dist loadfile "$@"
if [[ ${status} -eq 2 ]]; then # interrupted
    exit 2
fi
run tests/functional "$@"
if [[ ${ran} -eq 0 ]]; then
    echo "No test was run" >&2
    exit 5
fi
exit "${status}"
