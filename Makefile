# Everything here sets up .venv by itself. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test bench check clean

demo: $(INSTALLED)
	$(BIN)/python examples/text_lm.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -q

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell README.md docs src tests examples benchmarks
	$(BIN)/python -m pytest -q tests/unit/test_exports.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[demo,test]"
	touch $@

clean:
	rm -rf .venv out build dist .pytest_cache .mypy_cache .ruff_cache
