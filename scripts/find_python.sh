#!/usr/bin/env bash
# Prints the path of a Python that is new enough and can make virtual environments.
#
# Takes $PYTHON if set; else looks at the usual names on the PATH and at the versions that pyenv has
# installed.  A candidate is believed only after it has run: a pyenv shim exists for every version
# and refuses to start when that version is not selected.
set -euo pipefail

minimum_minor=12
check="import sys, venv, ensurepip
sys.exit(0 if sys.version_info[:2] >= (3, ${minimum_minor}) else 1)"

usable() {
    [[ -n "$1" ]] && "$1" -c "${check}" >/dev/null 2>&1
}

if [[ -n "${PYTHON:-}" ]]; then
    # Who names one gets that one or an error.
    candidates=("${PYTHON}")
else
    candidates=(python3.12 python3 python3.13 python3.14 python)
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        if [[ -n "${root}" && -d "${root}/versions" ]]; then
            candidates+=("${root}"/versions/3.*/bin/python)
        fi
    done
fi

refused=()
for candidate in "${candidates[@]}"; do
    path="$(command -v -- "${candidate}" || true)"
    if usable "${path}"; then
        # The interpreter itself, so that a later change of pyenv's selection does no harm.
        "${path}" -c 'import sys; print(sys.executable)'
        exit 0
    elif [[ -n "${path}" ]]; then
        version="$("${path}" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null ||
            echo "does not run")"
        refused+=("${path} (${version})")
    fi
done

{
    echo "No Python >= 3.${minimum_minor} with the venv and ensurepip modules was found."
    if ((${#refused[@]})); then
        printf 'Looked at: %s\n' "${refused[@]}"
    fi
    echo "Install one (Debian, Ubuntu: apt install python3.12-venv; or: pyenv install 3.12),"
    echo "or name another: make PYTHON=/path/to/python3.12 <target>"
} >&2
exit 1
