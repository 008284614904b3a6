# make quickstart   install into .venv and run the quickstart; ends with the path of report.html
# make test         the test suite: an example of everything, within tests/budget.json
# make test-ci      what CI adds: further examples, launches, the real data
# make test-slow    the series that take minutes each
# make lint types   what CI checks beside the tests
# make same BASE=C  whether commit C and HEAD give the same numbers, bit for bit
# make release      a wheel and an archive in dist/, tried in an empty environment
# make gpu TEXTS=F  on a GPU: kernels right and fast, 24-layer teachers, a distillation step
#
# Nothing is installed twice: a stamp in .venv is older or newer than pyproject.toml and
# constraints.txt.

PYTHON ?= python3
VENV ?= .venv
FOLDER ?= runs/quickstart
GPU_RESULTS ?= runs/gpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: quickstart test test-ci test-slow same gpu release lint types clean
.DELETE_ON_ERROR:

# An interrupted quickstart is continued, a finished one is shown: its folder is never lost.
quickstart: $(RUN_STAMP)
	@if [ -f "$(FOLDER)/results.json" ]; then \
	    echo "$(FOLDER) holds a finished run. For a new one remove it, or: make quickstart FOLDER=runs/again"; \
	elif [ -f "$(FOLDER)/recipe.yaml" ]; then \
	    echo "Continuing the run in $(FOLDER)"; \
	    $(BIN)/ds-distill quickstart --folder "$(FOLDER)" --resume; \
	else \
	    $(BIN)/ds-distill quickstart --folder "$(FOLDER)"; \
	fi
	@$(BIN)/python -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).absolute())' "$(FOLDER)/report.html"

# Files in their order: those that take minutes begin first.
PYTEST := $(BIN)/python -m pytest --durations=10
WORKERS := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(DEV_STAMP)
	$(PYTEST) $(WORKERS)

test-ci: $(DEV_STAMP)
	$(PYTEST) $(WORKERS) tests/ci

test-slow: $(DEV_STAMP)
	$(PYTEST) tests/series tests/two_hosts

# For changes that must move no number. One that does on purpose: python tests/golden/golden.py --write
same: $(DEV_STAMP)
	@test -n "$(BASE)" || { echo "Name a commit to compare HEAD with: make same BASE=main" >&2; exit 1; }
	$(BIN)/python tests/golden/two_commits.py $(BASE)

# On a machine with a GPU: every check and measurement that needs one.
gpu: $(DEV_STAMP)
	@test -n "$(TEXTS)" || { echo "Give a file with one text a line: make gpu TEXTS=texts.txt.gz" >&2; exit 1; }
	$(PIP) liger-kernel textbrewer
	$(BIN)/python tools/gpu/run.py --texts "$(TEXTS)" --output "$(GPU_RESULTS)"

release: $(DEV_STAMP)
	@test -z "$$(git status --porcelain)" || { echo "Commit first: what is released is what is committed" >&2; exit 1; }
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(PYTEST) tests/series/test_packaging.py

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff check --target-version py312 --ignore UP,RUF100 .   # UP: what Python 3.11 does not have
	$(BIN)/ruff format --check .
	PYTHONPATH=.:kernels $(BIN)/python tests/shape.py

types: $(DEV_STAMP)
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.12

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# torch comes first and alone: asked for together with packages that name it without a version,
# pip may look at builds that bring gigabytes of CUDA libraries.
$(RUN_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V). Try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@echo "Installing into $(VENV): minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e '.[quickstart]'
	@touch $@

# gpu: Triton runs the GPU kernels' tests in its interpreter on machines without a GPU.
$(DEV_STAMP): $(RUN_STAMP)
	@echo "Installing what the tests need into $(VENV)"
	@$(PIP) -e '.[quickstart,dev,tensorboard,gpu]'
	@touch $@
