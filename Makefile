# Everything here sets up .venv by itself. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo demo-multi-worker demo-ps test test-sources bench soak check clean

demo: $(INSTALLED)
	$(BIN)/python examples/text_lm.py

# On CPUs everywhere: two workers cannot share a GPU.
demo-multi-worker: $(INSTALLED)
	JAX_PLATFORMS=cpu $(BIN)/phalanx run --workers 2 examples/multi_worker.py

# The same: two workers and two servers.
demo-ps: $(INSTALLED)
	JAX_PLATFORMS=cpu $(BIN)/python examples/parameter_server.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 3 --dist loadfile

test-sources: .venv-sources/.installed
	.venv-sources/bin/python -m pytest -q tests/sources

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

soak: $(INSTALLED)
	$(BIN)/python -m benchmarks restarts

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell README.md docs src tests examples benchmarks
	$(BIN)/python -m pytest -q tests/unit/test_exports.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[data,demo,ps,test]"
	touch $@

# Libraries whose datasets Phalanx takes, but does not need. TensorFlow 2.21 wants an older h5py than the constraints.
.venv-sources/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-sources
	grep -v '^h5py==' constraints.txt > .venv-sources/constraints.txt
	.venv-sources/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-sources/constraints.txt \
		--editable ".[data,test]" torch==2.13.0 datasets==5.2.0 tensorflow-cpu==2.21.0
	touch $@

clean:
	rm -rf .venv .venv-sources out build dist .pytest_cache .mypy_cache .ruff_cache
