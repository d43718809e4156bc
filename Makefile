# Every target makes .venv for itself: Linux, a Python of 3.11 to 3.13 and a network (or a pip that knows where its wheels are)
# are all it needs. Versions are those of constraints.txt, so that pip never chooses another torch.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
JOB := examples/digits.py
BENCHES := overhead startup axes memory recompute parity zoo verify gate faults resume mutations launches adversary watch forecast planning published data damage waiting dlrm server served crashes moves hosts explore garbage

.PHONY: help demo test test-slice test-all check format clean $(BENCHES:%=bench-%)

help:
	@echo "make demo        plan and train $(JOB) on this machine (JOB=examples/gpt.py: another)"
	@echo "make test        run the fast tests and one real path through each capability (minutes)"
	@echo "make test-slice  run a part of the slow tests, drawn by the commit"
	@echo "make test-all    run all tests"
	@echo "make check       formatting, lint, types, import contracts"
	@echo "make bench-NAME  measure: $(BENCHES)"
	@echo "make clean       remove .venv and caches"

demo: $(VENV)/.examples
	@rm -rf runs/demo
	@$(BIN)/echelon plan $(JOB)
	@$(BIN)/echelon train $(JOB) --out runs/demo
	@echo "its report: runs/demo/report.html"

# Compiled once: where PYTHONDONTWRITEBYTECODE is set, as in many containers, each of the processes that tests start would do it again.
test test-slice test-all: $(VENV)/.dev
	@$(BIN)/python -m compileall -q echelon tests bench examples
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --tier $(TIER) $(ARGS)

test: TIER := quick
test-slice: TIER := slice
test-all: TIER := all

check: $(VENV)/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

$(BENCHES:%=bench-%): bench-%: $(VENV)/.bench
	@$(BIN)/python -m bench.$* $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# python3 if it is one that we support, else the newest that is. A shim that answers with an error does not count.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then \
	    echo "making $(VENV) with $$($$python -V)"; exec $$python -m venv $(VENV); fi; \
	done; echo "no Python of 3.11 to 3.13 found; install one or say make PYTHON=/path/to/python" >&2; exit 1

$(VENV)/.examples $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing echelon[$*] into $(VENV) (minutes the first time)"
	@$(PIP) -e '.[$*]'
	@touch $@
