# Two commands on a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# 2.6 is the lowest allowed; a registry without its CPU build tests the other requirements alone.
LOWEST_TORCH ?= 2.13.0
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-gpu test-llm test-slow test-lowest torture fuzz lint format figures docs dist clean

demo: $(VENV)/.installed
	$(BIN)/alasso demo --out runs/demo

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# Those of the tests that are skipped where there is no GPU.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "gpu and not slow"

# Those that need TRL, its datasets, and bitsandbytes, which `make test` does not install.
test-llm: $(VENV)/.installed-dev
	$(INSTALL) -e '.[dev,llm]'
	$(BIN)/python -m pytest tests/integrations/test_trl.py tests/integrations/test_language_models.py tests/test_guides.py \
		tests/bench/data/test_rows.py

# Needs the real data sets (alasso data fetch) and minutes to hours.
test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

# The laboratory's tests with the lowest versions that pyproject.toml allows of what it needs beside torch.
test-lowest:
	$(PYTHON) -m venv $(VENV)-lowest
	sed -n '/^bench = /,/^]/s/^ *"\([A-Za-z0-9-]*\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml > $(VENV)-lowest/lowest.txt
	$(VENV)-lowest/bin/python -m pip install --quiet 'torch==$(LOWEST_TORCH)' -r $(VENV)-lowest/lowest.txt pytest hypothesis
	$(VENV)-lowest/bin/python -m pip install --quiet .
	$(VENV)-lowest/bin/python -m pytest -p no:cacheprovider -W ignore::DeprecationWarning tests/bench

# Faults by the hundred: kills, full disks, low limits, damaged files; a quarter of an hour. The same command resumes.
torture: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/torture.py

# Over a million damaged and made-up files for every reader; some 15 minutes on a core. A short form is in `make test`.
fuzz: $(VENV)/.installed-dev
	nice $(BIN)/python tools/fuzz.py

# The paper's claims judged anew from the committed results, with the figures that the documents show drawn anew.
figures: $(VENV)/.installed-dev
	rm -f paper/figures/*.svg
	$(BIN)/alasso reproduce --judge

# The documentation site in site/; a warning is an error. The search needs a server: python3 -m http.server -d site
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Wheel and sdist in dist/, byte for byte those of everybody else who builds this commit.
dist: $(VENV)/bin/python
	$(INSTALL) build twine check-wheel-contents
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-lowest dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[bench]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e '.[dev,docs]'
	$(INSTALL) --no-deps curvlinops-for-pytorch
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e '.[docs]'
	touch $@
