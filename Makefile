# make setup  installs what a miner needs, nothing else
# make run    and what a whole subnet on this machine needs; then runs one
# make dev, make test               and what tests and linters need; then runs the tests
# make test-quick, make test-long   only the fast ones; only those of each night
# make mutate                     makes small mistakes in the product: tests must notice 95 %
# make coverage                   lines and branches that the unit tests run, by file
# make gpu    measures everything that is claimed of a GPU on this machine's; no set-up needed
# make clean  removes the environment and what was built; no miner's run folder
# make lint, make size              linters and types; the size of the code, its goals and ratchet
# make docs                         the documents as a site: build/site/index.html
# make wheel                        the wheel of this commit, for members: build/wheel
# make release                      checks, then the wheel, its sources and notes: build/release
PY := .venv/bin/python
# Half of a test is waiting. A file's tests stay together: what they share is started once. Long files
# come first (conftest.py).
WORKERS := -n 5 --dist loadfile --no-loadscope-reorder
# No test of these needs what another of its file has set up, and half of their time is waiting.
UNIT := -n 4 --dist worksteal tests/unit tests/contract bench
# The oldest that the project allows; `make test-long` runs the tests of training with it too.
OLDEST_TORCH := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
# Hundreds of programs are started: what one has compiled the next one reads, wherever that is off.
test test-quick test-long: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup dev run test test-quick test-long mutate coverage gpu lint lint-ruff lint-mypy lint-imports lint-prose docs size pm2 wheel release clean

help:
	@sed -n 's/^# //p' Makefile

setup:
	@scripts/setup.sh

dev:
	@scripts/setup.sh local dev

run:
	@scripts/setup.sh local
	@$(PY) scripts/localnet.py $(ARGS)

test: dev
	$(PY) -m pytest $(WORKERS) -m "not long" $(ARGS)

test-quick: dev
	$(PY) -m pytest $(UNIT) -m "not slow and not long" $(ARGS)

test-long: dev build/torch-$(OLDEST_TORCH)/.made
	$(PY) -m pytest -n 2 --dist worksteal -m long $(ARGS)

mutate: dev
	$(PY) -m tests.tools.mutate $(ARGS)

# Only in the processes of pytest: code that a test forks or starts counts as not run.
coverage: dev build/coverage/.made
	COVERAGE_FILE=build/coverage/data build/coverage/bin/python -m pytest $(UNIT) -m "not long" \
		--cov=distributed_training --cov-branch --cov-report=term --cov-fail-under=83 $(ARGS)

build/coverage/.made: | dev
	$(in-front-of-venv)
	$(PY) -m pip --python $(@D)/bin/python install --quiet pytest-cov==7.1.0
	touch $@

# An environment like .venv with another torch in front, for test_oldest_torch.py. PyPI's build of
# torch for Linux has CUDA; where PyTorch's own index can be reached it is the small one for the CPU.
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
define in-front-of-venv
	$(PY) -m venv --clear --without-pip $(@D)
	$(PY) -c '$(PURELIB)' > "$$($(@D)/bin/python -c '$(PURELIB)')/project.pth"
endef
build/torch-%/.made: | dev
	$(in-front-of-venv)
	$(PY) -m pip --python $(@D)/bin/python install --quiet "torch==$*.0+cpu" 2>/dev/null || \
	$(PY) -m pip --python $(@D)/bin/python install --quiet "torch==$*.0+cpu" \
		--extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null || \
	$(PY) -m pip --python $(@D)/bin/python install --quiet "torch==$*.0"
	touch $@

# The environment's Python if there is one, else the machine's.
gpu:
	@$(or $(wildcard $(PY)),python3) bench/gpu.py $(ARGS)

size: dev
	@$(PY) -m bench.size $(ARGS)

lint: lint-ruff lint-mypy lint-imports lint-prose

lint-ruff: dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

lint-mypy: dev
	.venv/bin/mypy

lint-imports: dev
	.venv/bin/lint-imports

lint-prose: dev
	$(PY) -m tests.tools.prose

# mkdocs fetches nothing; --strict fails on a link that leads nowhere.
docs: dev
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(PY) -m http.server --bind 127.0.0.1 --directory build/site"

wheel: setup
	@PYTHONPATH=. $(PY) scripts/release.py --wheel

release: lint docs
	$(PY) -m pytest tests/end_to_end/test_wheel.py tests/unit/test_release.py
	PYTHONPATH=. $(PY) scripts/release.py

# pm2 for the tests that need it, in build/node, not on the machine
pm2:
	npm install --silent --no-fund --no-audit --prefix build/node pm2@7

# runs/ holds the run folders of real miners: only the local subnet's goes. What a process has loaded
# of .venv is in its map of memory.
clean:
	@if grep -qsF " $(CURDIR)/.venv/" /proc/[0-9]*/maps; then \
	    echo "error: a process runs from .venv, so nothing was removed: stop it first (pm2 list)" >&2; \
	    exit 2; \
	fi
	rm -rf .venv build runs/localnet
