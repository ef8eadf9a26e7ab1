# make run    sets up, then runs a whole subnet on this machine
# make test   sets up, runs the tests
# make test-quick, make test-long   only the fast ones; only those of many minutes
# make gpu    measures everything that is claimed of a GPU on this machine's; no set-up needed
# make lint, make house             linters and types; the size of the code beside its goals
PY := .venv/bin/python
# A file's tests stay together: what they share is started once. Long files come first (conftest.py).
WORKERS := -n 4 --dist loadfile --no-loadscope-reorder
# Hundreds of programs are started: what one has compiled the next one reads, wherever that is off.
test test-quick test-long: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup run test test-quick test-long gpu lint lint-ruff lint-mypy lint-imports house pm2 clean

help:
	@sed -n 's/^# //p' Makefile

setup:
	@scripts/setup.sh

run: setup
	@$(PY) scripts/localnet.py $(ARGS)

test: setup
	$(PY) -m pytest $(WORKERS) -m "not long" $(ARGS)

test-quick: setup
	$(PY) -m pytest $(WORKERS) -m "not slow and not long" $(ARGS)

test-long: setup
	$(PY) -m pytest -n 2 --dist load -m long $(ARGS)

# The environment's Python if there is one, else the machine's.
gpu:
	@$(or $(wildcard $(PY)),python3) bench/gpu.py $(ARGS)

house: setup
	@$(PY) -m bench.house $(ARGS)

lint: lint-ruff lint-mypy lint-imports

lint-ruff: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

lint-mypy: setup
	.venv/bin/mypy

lint-imports: setup
	.venv/bin/lint-imports

# pm2 for the tests that need it, in build/node, not on the machine
pm2:
	npm install --silent --no-fund --no-audit --prefix build/node pm2@7

clean:
	rm -rf .venv build runs
