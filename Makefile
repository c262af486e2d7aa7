PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint clean

demo: $(READY)  ## match the bundled pairs of photos and write pictures to demo/
	$(BIN)/prism demo -o demo

test: $(READY)  ## the default suite: 2 CPU cores, no network, minutes
	$(BIN)/pytest

test-slow: $(READY)  ## everything that runs on this machine
	$(BIN)/pytest -m "slow or gpu or not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache
