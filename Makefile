# Every target works in a fresh clone with python >= 3.11, make and a package index.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
FAULT_POINTS ?= build/fault-points
SEED ?= 0
RUNS ?= 5

.DEFAULT_GOAL := help
.PHONY: help setup demo test tools check bench compare soak fault-soak chaos chaos-runs explore \
	partitions fault-points simulate clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 22

setup: $(STAMP) ## environment in .venv with everything installed

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "python >= 3.11 is needed; give it as: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev,docs]'
	@touch $@

demo: setup ## train a GPT, kill a node in the middle of a step, compare with a failure-free run
	$(BIN)/python -m examples.demo

test: setup tools ## the whole test suite
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

tools: # what some tests need besides Python, where it can be had; they say so and skip where not
	@command -v apt-get >/dev/null || exit 0; \
	root=$$(test "$$(id -u)" = 0 || echo sudo -n); export DEBIAN_FRONTEND=noninteractive; \
	for tool in prometheus chromium; do command -v $$tool >/dev/null || { \
		install="apt-get install -y -qq --no-install-recommends $$tool"; \
		timeout 120 $$root $$install || { timeout 60 $$root apt-get update -qq && timeout 120 $$root $$install; }; \
	} </dev/null >/dev/null 2>&1 || true; done; \
	timeout 200 sh tests/store/fetch_etcd.sh build/etcd </dev/null >/dev/null 2>&1 || true

check: setup ## lint, types, import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## every benchmark; results in benchmarks/results/
	@set -e; for file in $$(grep -rl --include='*.py' 'results import.*save' benchmarks | sort); do \
		name=$${file%.py}; echo "== $$name"; $(BIN)/python -m $$(echo $$name | tr / .); done

compare: setup ## this runtime beside torchft, torchrun and NVRx: the same work, the same kills
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) torchft==0.2.0 \
		nvidia-resiliency-ext==0.4.1
	$(BIN)/python -m benchmarks.compare

docs: setup ## the documentation site in build/docs; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

soak: setup ## 30 minutes of training on a loaded machine: nothing may be done about anybody
	ELASTIC_SOAK_S=1800 $(BIN)/python -m pytest -m chaos tests/scenarios/health/test_soak.py

fault-soak: setup ## an hour of training under load with a fault every 20 s: nothing may grow
	$(BIN)/python -m benchmarks.soak --minutes 60 --load 8

chaos: setup ## long random fault campaigns
	$(BIN)/python -m pytest -m chaos

partitions: setup ## every pair, direction and phase of a partial partition; continues where it ended
	$(BIN)/python -m benchmarks.partial_partitions

EXPLORE := $(BIN)/python -m tests.core.exploration --results benchmarks/results/exploration.jsonl
explore: setup ## every interleaving of a small job with two faults, for hours; continues where it ended
	$(EXPLORE) --faults 1 --nodes 2 --from-start
	$(EXPLORE) --faults 1
	$(EXPLORE) --faults 1 --kinds "lost save" --lost-writes 2
	$(EXPLORE) --faults 2 --jobs 2

fault-points: setup ## fail, kill or stop at each call that a backup depends on; continues where it ended
	mkdir -p $(FAULT_POINTS)
	$(BIN)/python -m tests.faultpoints.enumeration --results $(FAULT_POINTS)/small.jsonl
	$(BIN)/python -m tests.faultpoints.campaign --results $(FAULT_POINTS)/real.jsonl --seed $(SEED) --runs $(RUNS)

SIMULATE_S ?= 600
simulate: setup ## SIMULATE_S seconds of jobs with fresh seeds, on a simulated cluster
	$(BIN)/python -m tests.simulation --seconds $(SIMULATE_S)

chaos-runs: setup ## 300 random real runs with random faults; needs root
	$(BIN)/python -m benchmarks.chaos --runs 300

clean: ## remove the environment and all leftovers
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
