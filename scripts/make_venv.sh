#!/usr/bin/env bash
# Makes or updates the virtual environment given as the only argument.  TORCH=VERSION takes another torch than the
# pinned one, with the libraries that it asks for.  MEGATRON=VERSION takes another megatron-core, and MEGATRON=FOLDER a
# Megatron-LM checkout, which compiles its dataset helpers when a training first starts.
#
# A complete environment only gets what has changed.  One whose installation was interrupted may
# hold half a package that pip takes for a whole one, so it is made anew, as is one whose Python
# does not run any more; pip's cache then spares the downloads.
set -euo pipefail

venv="${1:?usage: make_venv.sh DIRECTORY}"
cd "$(dirname "$0")/.."
unfinished="${venv}/.installing"

if [[ -e "${unfinished}" ]] || ! "${venv}/bin/python" -m pip --version >/dev/null 2>&1; then
    python="$(scripts/find_python.sh)"
    echo "Making ${venv} with ${python}"
    rm -rf "${venv}"
    "${python}" -m venv "${venv}"
fi

constraints=requirements/constraints.txt
if [[ -n "${TORCH:-}" ]]; then
    constraints="${venv}/constraints.txt"
    # What a build of torch pins itself: Triton, the libraries of CUDA, and the set-up tools that it can be built with.
    grep -vE '^(torch|triton|sympy|setuptools|nvidia-.*|cuda-.*)==' requirements/constraints.txt >"${constraints}"
    echo "torch==${TORCH}" >>"${constraints}"
fi

install() {
    "${venv}/bin/python" -m pip install --disable-pip-version-check --no-input --quiet "$@"
}

touch "${unfinished}"
echo "Installing the pinned dependencies into ${venv} (5 GB, some minutes the first time)"
if [[ -z "${TORCH:-}" ]]; then
    # Every file is compared with its digest.  Nothing but the list is installed, and nothing of it is left out.
    install --require-hashes --no-deps --requirement requirements/hashes.txt
    install --no-build-isolation --no-deps --editable .
else
    install --constraint "${constraints}" setuptools
    install --constraint "${constraints}" --no-build-isolation --editable '.[planner,test,lint]'
    # Lion and Muon need Triton, which not every build of torch has; their tests are skipped without.
    install --constraint "${constraints}" --no-build-isolation --editable '.[optimizers]' ||
        echo "Without the optimizers Lion and Muon: their packages cannot be installed here" >&2
fi
if [[ -d "${MEGATRON:-}" ]]; then
    # A checkout in the place of the wheel, whose libraries are installed.
    "${venv}/bin/python" -m pip uninstall --disable-pip-version-check --quiet --yes megatron-core
    packages="$("${venv}/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    (cd "${MEGATRON}" && pwd) >"${packages}/megatron.pth"
elif [[ -n "${MEGATRON:-}" ]]; then
    install --no-deps "megatron-core==${MEGATRON}"
fi
rm "${unfinished}"
