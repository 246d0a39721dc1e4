# make quick | test | soak | again | demo | lint | bench | bench-ranks | docs | release: each builds .venv first if it is missing or stale.

# The first Python that is new enough; `make PYTHON=/path/to/python` overrides the choice.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
BASE := .venv/.base
STAMP := .venv/.complete

# Tests run on all cores, up to eight, and one more: some wait for a timeout.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n + 1 : 8)))
unexport PYTHONDONTWRITEBYTECODE  # or every process compiles all modules again
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

.PHONY: quick test soak again demo lint format bench bench-ranks docs release clean

quick: $(STAMP)
	$(PYTEST) -m "not (processes or browser or documents or slow or soak)"

test: $(STAMP)
	$(PYTEST) -m "not (browser or documents or soak)" --durations=25

soak: $(STAMP)
	$(PYTEST) -m "browser or documents or soak" --durations=25

again: $(STAMP)  # what failed last, alone and by name: three tests at most, or something is broken
	@$(BIN)/python -c 'import json; failed = json.load(open(".pytest_cache/v/cache/lastfailed")); \
		print("== once more, alone:", *failed, sep="\n"); raise SystemExit(len(failed) > 3 and "too many to be chance")'
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

demo: $(BASE)  # without what only tests need
	$(BIN)/python -m klatsch demo

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

# What takes longer than minutes, fetches packages, or needs torchrun and a GPU is run by hand.
LONG := planner chaos peers peer_programs post_local plan_seconds gpu lanes

bench: $(STAMP)
	@for f in $(filter-out $(LONG:%=benchmarks/%.py),$(wildcard benchmarks/[a-z]*.py)); do echo "== $$f"; $(BIN)/python $$f || exit 1; done

bench-ranks: $(STAMP)
	$(BIN)/python benchmarks/ranks.py

docs: $(STAMP)  # the site, in build/site; a warning is an error
	@$(INSTALL) '.[dev,docs]'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto docs build/site
	$(BIN)/python -m tests.tools.site build/site

release: $(BASE)  # wheel and sdist in dist, checked and installed: what is left is to upload them
	@$(INSTALL) '.[all,release]'
	$(BIN)/python -m tests.tools.release

# A stamp is written last, so an interrupted install is stale and is built again. The constraints come from the
# environment, since only so do they reach the build of the package itself (the second name is that of newer pips).
INSTALL = PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable

$(BASE): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "klatsch needs Python 3.11 or newer and found none: install it, or name it with make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "building .venv with $(PYTHON) (a minute or two; torch is large)"
	@$(PYTHON) -m venv --clear .venv
	@$(INSTALL) '.[all]'
	@touch $@

$(STAMP): $(BASE)
	@echo "adding what tests need: frameworks, linters"
	@$(INSTALL) '.[dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist klatsch-demo.*
