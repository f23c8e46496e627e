# Everything runs in .venv, which each target makes by itself: only Python >= 3.10 and make are needed.
#
#   make demo    preprocess, train on several processes, resume, generate (a few minutes on 2 cores)
#   make test    all tests                       make test PYTEST_ARGS="tests/pure -x"
#   make check   what must be clean: format, lint, types, direction of imports
#   make lint    format and fix in place

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
BIN := $(VENV)/bin

# processes share the cores: waiting threads must not spin
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test check lint clean

demo: $(VENV)/.installed-test
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "isotron needs Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)"; exit 1; }

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing isotron and what it needs into $(VENV) (once; torch is large, this takes minutes without a line)"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[$*]'
	@touch $@
