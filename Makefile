# make setup: .venv from the lock. make demo: the main job, from nothing. make test: what CI checks, beside the site.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo docs test test-slow test-oldest test-newest test-matrix lint format lock clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "discern needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Say which to use: make PYTHON=python3.12 " )'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

demo: setup
	$(BIN)/discern demo --out demo

# Warnings, dead links among them, are errors. Start at site/index.html.
docs: setup
	$(BIN)/python -m docs._sphinx.build --out site

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -n 2 -m slow

# The tests that depend most on the versions of other packages: at the lower bounds of pyproject.toml, and at the newest.
BOUNDED := [A-Za-z0-9_-]+
VERSION_TESTS := tests/golden/test_golden.py::test_the_losses_are_those_recorded tests/parity tests/training/test_loop.py \
	tests/model_files/test_networks.py tests/model_files/test_export.py
test-oldest: BOUND := ==
test-newest: BOUND := >=
test-oldest test-newest: test-%:
	$(PYTHON) -m venv --clear $(VENV)-$*
	grep -oE '$(BOUNDED)>=[0-9.]+' pyproject.toml | sed 's/>=/$(BOUND)/' > $(VENV)-$*/constraints.txt
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(VENV)-$*/constraints.txt --editable '.[test]'
	$(VENV)-$*/bin/python -m pytest -n 2 --dist loadfile $(VERSION_TESTS)

# The oldest and the newest torch, on every Python found. Other packages are the newest: the oldest NumPy has no wheel for 3.13.
PYTHONS = $(foreach version,3.11 3.12 3.13 3.14,$(shell python$(version) -c 'import sys; print(sys.executable)' 2>/dev/null))
test-matrix:
	set -e; for python in $(PYTHONS); do for torch in oldest newest; do \
		$(MAKE) test-$$torch BOUNDED=torch PYTHON=$$python; done; done

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The lock is what a fresh environment resolved to; torch stays a plain pin, so that it installs the CPU build where one
# is offered and the ordinary one elsewhere.
lock:
	rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)-lock/bin/python -m pip install --quiet '.[dev]'
	$(VENV)-lock/bin/python -m pip freeze --exclude discern-nlp | sed -E 's/^(torch==[0-9.]+)\+.*/\1/' > requirements.lock
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) $(VENV)-* demo site build dist
