# make demo    set up, train two small networks and compare them: under 2 minutes once installed
# make test    set up what tests need and run the quick tests
# make check   slower checks: other people's implementations, many processes, documentation
# make gpu     on a machine with a CUDA device: every fast path against its slow twin
# make lint    ruff, mypy and the rules between the rooms of the house
# make soak    kill and resume training and evaluation, ten times over

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test check gpu lint soak clean

demo: .venv/core
	$(BIN)/hardsphere demo

test: .venv/test lint
	$(BIN)/pytest -n 2 -m "not check and not gpu"

check: .venv/check
	$(BIN)/pytest -n 2 -m "check and not gpu"

gpu: .venv/test
	$(BIN)/pytest -m gpu

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: .venv/test
	for round in 1 2 3 4 5 6 7 8 9 10; do $(BIN)/pytest -n 2 -k "kill" || exit 1; done

clean:
	rm -rf .venv build dist runs

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

.venv/test: .venv/core
	$(PIP) --editable ".[test]"
	touch $@

.venv/check: .venv/test
	$(PIP) --editable ".[test,check]"
	touch $@
