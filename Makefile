PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
RELEASE := $(VENV)/.release
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-wheel lint docs audit sbom clean
export NO_MKDOCS_2_WARNING = 1

demo: $(INSTALLED)  ## match the bundled pairs of photos and write pictures to demo/
	$(BIN)/prism demo -o demo

test: $(READY)  ## the default suite: 2 CPU cores, no network, minutes
	$(BIN)/pytest

test-slow: $(READY)  ## everything that runs on this machine
	$(BIN)/pytest -m "slow or gpu or not slow"

test-wheel: $(INSTALLED)  ## the wheel in an empty environment of each Python from 3.10 to 3.13 that is here
	$(BIN)/python benchmarks/wheel.py

audit: $(RELEASE)  ## known weaknesses of what is installed; asks pypi.org, and fails where that does not answer
	mkdir -p build
	$(BIN)/pip freeze --exclude-editable | sed 's/+.*//' > build/installed.txt
	$(BIN)/pip-audit --strict --disable-pip --no-deps -r build/installed.txt

sbom: $(RELEASE)  ## what a release is made of, as CycloneDX, and the hashes of its weights, in dist/
	mkdir -p dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o dist/sbom.cdx.json $(BIN)/python
	cp src/prism_match/weights/SHA256SUMS dist/SHA256SUMS
	cd src/prism_match/weights && sha256sum --check SHA256SUMS

docs: $(READY)  ## the documentation as a site in site/; stops at a broken link, or what is loaded from elsewhere
	$(BIN)/mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	if [ -x $(BIN)/mkdocs ]; then $(BIN)/mkdocs build --strict --quiet --site-dir build/site; fi

$(INSTALLED): pyproject.toml constraints.txt  # what matching and the page need: the first run is to be short
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[serve]"
	touch $(INSTALLED)

$(RELEASE): $(INSTALLED)
	$(PIP) -e ".[release]"
	touch $(RELEASE)

$(READY): $(INSTALLED)
	$(PIP) -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist demo site .pytest_cache .mypy_cache .ruff_cache
