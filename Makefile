# Each target makes and uses its own environment in .venv. PYTHON chooses the interpreter (3.11 or newer) it is made from.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check bench bench-wide chaos docs clean

demo: .venv/installed
	$(BIN)/atoll compare single data-parallel diloco:outer_momentum=0.5 --workers 4 --period 20 --steps 600

test: .venv/installed
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: .venv/installed
	$(BIN)/python -m bench

# Engines over an emulated wide-area link; as root, with cc.
bench-wide: .venv/installed
	$(BIN)/python -m bench wide

# Drawn faults upon islands in threads, and upon processes over real links.
chaos: .venv/installed
	$(BIN)/python -m tests.peers.wide.chaos --seeds 0 200
	$(BIN)/python -m tests.peers.wide.fleet --seeds 0 20

docs: .venv/installed
	$(BIN)/python docs/verify.py
	$(BIN)/pdoc --output-directory build/api atoll

# What a person made with the demo, runs/, stays.
clean:
	rm -rf .venv build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Atoll needs Python 3.11 or newer; say PYTHON=...")'
	@echo "Making .venv: a minute where pip has torch in its cache, else as long as its download takes"
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@
