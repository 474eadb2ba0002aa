#!/usr/bin/env bash
# Runs the tests of the bus and the runtime on each further Python that stepcast supports and this machine has.
#
# torch is not installed there: neither of the two imports it, and the tests that need it skip themselves.

set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
    local version=$1 candidate
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        # A name on the PATH may be a shim for a version that is not active, so ask.
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

make_environment() {
    local python=$1 environment=$2
    local -a install=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
    local file stale=""
    for file in setup.cfg pyproject.toml constraints.txt tests/run_pythons.sh; do
        [[ $environment/installed -nt $file ]] || stale=yes
    done
    [[ $stale ]] || return 0
    "$python" -m venv --clear "$environment"
    "${install[@]}" --constraint constraints.txt \
        msgpack pyzmq rich structlog 'tomli; python_version < "3.11"' typer \
        hypothesis numpy psutil pytest pytest-randomly pytest-timeout
    "${install[@]}" --no-deps --editable .
    touch "$environment/installed"
}

paths=()
for path in tests/bus tests/runtime tests/test_architecture.py tests/test_leak_guard.py; do
    [[ -e $path ]] && paths+=("$path")
done

failed=()
for version in 3.10 3.12 3.13; do
    python=$(find_python "$version")
    if [[ -z $python ]]; then
        echo "== Python $version: not found on this machine, skipped"
        continue
    fi
    echo "== Python $version: $python"
    make_environment "$python" ".venv-$version"
    ".venv-$version/bin/python" -m pytest "${paths[@]}" "$@" || failed+=("$version")
done

if ((${#failed[@]})); then
    echo "== failed on Python ${failed[*]}" >&2
    exit 1
fi
