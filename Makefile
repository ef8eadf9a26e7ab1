# make run    sets up, then runs a whole subnet on this machine
# make test   sets up, runs the tests
PY := .venv/bin/python

.PHONY: help setup run test test-quick lint pm2 clean

help:
	@sed -n 's/^# //p' Makefile

setup:
	@scripts/setup.sh

run: setup
	@$(PY) scripts/localnet.py $(ARGS)

test: setup
	$(PY) -m pytest $(ARGS)

test-quick: setup
	$(PY) -m pytest -m "not slow" $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# pm2 for the tests that need it, in build/node, not on the machine
pm2:
	npm install --silent --no-fund --no-audit --prefix build/node pm2@7

clean:
	rm -rf .venv build runs
