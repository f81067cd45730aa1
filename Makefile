# Everything here sets up .venv by itself, except `make gpu`. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DEMO_INSTALLED := .venv/.demo-installed

.PHONY: help demo demo-crash demo-multi-worker demo-ps pictures gallery test-fast test test-all draws mutants test-hub test-slurm test-sources test-topologies test-oldest test-newest coverage coverage-no-jax bench bench-report gpu soak check docs dist clean

help: ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 25

# The second time, JAX takes the compiled programs of the demos from this folder.
DEMO := JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=out/programs JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1

# On CPUs everywhere, so that it is the same everywhere, and because two workers cannot share a GPU.
demo: $(DEMO_INSTALLED) ## train a small language model on one device and on two, and compare the two; continues where it was stopped
	$(DEMO) $(BIN)/python examples/text_lm.py --resume --summaries

demo-multi-worker: $(DEMO_INSTALLED) ## train it in two processes
	$(DEMO) $(BIN)/phalanx run --workers 2 examples/multi_worker.py

# One of three workers is killed. The others continue, and a new one joins them. On the same batches, so that one worker has the same losses.
CRASHING := examples/multi_worker.py --steps 200 --save-every 50 --shard data

demo-crash: $(DEMO_INSTALLED) ## kill one of three processes: the others continue at once, and a new process replaces it
	rm -rf out/demo-crash
	$(DEMO) $(BIN)/phalanx run --workers 2:3 $(CRASHING) --crash-at 60 --out out/demo-crash

pictures: $(DEMO_INSTALLED) ## draw the pictures of the README anew, from runs of the demos
	$(DEMO) $(BIN)/python docs/pictures.py

gallery: $(INSTALLED) ## run the programs of docs/examples.md, and write what they print, their time and their pictures
	$(BIN)/python docs/gallery.py $(ARGUMENTS)

# Two workers and two parameter servers.
demo-ps: $(INSTALLED) ## train a click model with two workers and two parameter servers
	JAX_PLATFORMS=cpu $(BIN)/python examples/parameter_server.py

test-fast: $(INSTALLED) ## run the unit tests that start no process and train no model
	$(BIN)/python -m pytest -q -n 2 --dist loadscope tests/unit -m "not slow"

test: $(INSTALLED) ## run the tests
	$(BIN)/python -m pytest -q -n 5 --dist loadscope

test-all: $(INSTALLED) ## run every cell of every table, on optimized programs, in new interpreters and with nothing compiled before
	PHALANX_TEST_ALL=1 $(BIN)/python -m pytest -q -n 5 --dist loadscope

draws: $(INSTALLED) ## run the property tests with hundreds of random cases each
	PHALANX_TEST_DRAWS=1 $(BIN)/python -m pytest -q -n 3 --dist loadscope -m hypothesis tests

test-hub: .venv-hub/.installed ## train models of KerasHub under strategies, in an environment of their own
	.venv-hub/bin/python -m pytest -q tests/hub

test-sources: .venv-sources/.installed ## run the tests of TensorFlow, torch and Hugging Face datasets, in an environment of their own
	.venv-sources/bin/python -m pytest -q tests/sources tests/docs/test_pages.py::test_tensorflow_program_prints_the_same

# Not in `make test`: it needs root, and installs packages of Debian or Ubuntu.
test-slurm: $(INSTALLED) ## install Slurm, start three nodes of it on this machine, and run the scripts of `phalanx run --print slurm`
	which slurmctld sbatch munged ip > /dev/null || { apt-get update && apt-get install --yes slurm-wlm munge iproute2; }
	PHALANX_TEST_SLURM=1 $(BIN)/python -m pytest -q tests/slurm

test-topologies: .venv-topologies/.installed ## compile steps of every strategy for TPUs and GPUs that are not here
	JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES=-1 XLA_FLAGS=--xla_gpu_autotune_level=0 .venv-topologies/bin/python -m pytest -q tests/topologies

# The unit and contract tests with the lowest and the highest versions that pyproject.toml promises.
# `make test-newest PYTHON=python3.13` does it with another interpreter.
test-oldest: .venv-oldest/.installed ## run the unit and contract tests with the lowest versions that are promised
	.venv-oldest/bin/python -m pytest -q -n 3 --dist loadscope tests/unit tests/contract

test-newest: .venv-newest/.installed ## run them with the highest versions, as an installation without constraints gets them
	.venv-newest/bin/python -m pytest -q -n 3 --dist loadscope tests/unit tests/contract

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt --editable ".[data,demo,migrate,ps,test]"
	touch $@

.venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable ".[data,demo,migrate,ps,test]"
	touch $@

# The rooms without JAX have a test for every branch; nobody needs a GPU or a cluster to run it.
NO_JAX := */_src/cluster/*,*/phalanx/cluster_resolver.py,*/phalanx/errors/*,*/_src/launch/*,*/_src/options.py

# A lost node and signals, which `make test` leaves out. What an actor runs is not measured: Ray ends its process by SIGKILL.
RAY_NODES := PHALANX_TEST_ALL=1 $(BIN)/coverage run -m pytest -q tests/unit/launch/test_ray_nodes.py

# Without the tests that interrupt every line of a step: they interrupt coverage too, which can then wait for itself for ever.
coverage: $(INSTALLED) ## run nearly all tests, and fail if they run less than 95% of the lines and branches
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 3 --dist loadscope --ignore=tests/contract/test_law4a_interrupts.py
	$(RAY_NODES)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include="$(NO_JAX)" --fail-under=100
	$(BIN)/coverage report --fail-under=95

coverage-no-jax: $(INSTALLED) ## run the tests of the rooms without JAX, and fail if they leave out a line or a branch
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 2 --dist loadscope tests/unit/cluster tests/unit/errors tests/unit/launch \
		tests/unit/tools/test_cli.py tests/unit/test_cluster_resolver.py tests/unit/test_errors.py tests/unit/test_options.py \
		src/phalanx/_src/cluster src/phalanx/cluster_resolver.py src/phalanx/errors src/phalanx/_src/launch src/phalanx/_src/options.py
	$(RAY_NODES)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include="$(NO_JAX)" --fail-under=100

# Each fault runs the tests of its room, so that all of them take up to 3 hours. `ARGUMENTS="--sample 10"` takes minutes.
mutants: $(INSTALLED) ## apply small faults to a copy of the sources, and show which tests notice them
	$(BIN)/python -m tests.mutants $(ARGUMENTS)

bench: $(INSTALLED) ## run all benchmarks
	$(BIN)/python -m benchmarks

# On a quiet machine. The page shows what has run, even if some benchmarks fail.
bench-report: $(INSTALLED) $(DEMO_INSTALLED) ## run all benchmarks in full, which takes hours, and write docs/benchmark_report.md
	-$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.page

# With the JAX and Keras of PYTHON: needs no network and installs nothing. pytest runs the contract rows, if it is there.
gpu: ## on a machine with GPUs: run the contract rows that fit and five benchmarks, and write out/gpu-report.md
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu --out out/gpu-report.md

soak: $(INSTALLED) ## kill, stop and fail workers in fifty ways
	$(BIN)/python -m benchmarks restarts elastic_callbacks elastic_data $(SOAK)

check: $(INSTALLED) ## formatting, linting, types, import contracts, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.structure
	$(BIN)/codespell README.md docs src tests examples benchmarks
	$(BIN)/python -m pytest -q tests/unit/test_api.py tests/docs/test_prose.py tests/contract/test_tests_can_be_found.py

# A warning is an error. Needs no network once .venv is there.
docs: $(INSTALLED) ## build the documentation into build/docs/index.html
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees docs build/docs

# The wheel is built from the sdist, so that the sdist has all that it needs. For a package index, set PHALANX_REPOSITORY to the address
# of the repository: the links of the README then work there.
dist: .venv-dist/.installed ## build the sdist and the wheel into dist/
	rm -rf dist
	.venv-dist/bin/python -m build .

.venv-dist/.installed:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build
	touch $@

# Only what the demos of text_lm.py import; `make test` adds the rest.
$(DEMO_INSTALLED): pyproject.toml constraints.txt
	@echo "Installing JAX, Keras and matplotlib into .venv takes about a minute, the first time only."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[tensorboard]" matplotlib
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[data,demo,docs,migrate,ps,test]"
	touch $(DEMO_INSTALLED) $@

# Without KerasHub's dependencies, but for those that it imports: TensorFlow would be a gigabyte, and no model needs it.
.venv-hub/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-hub
	.venv-hub/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[data]" pytest
	.venv-hub/bin/python -m pip install --quiet --disable-pip-version-check --no-deps keras-hub==0.32.0 regex==2026.11.19 sentencepiece==0.2.3 tokenizers==0.23.3
	touch $@

# Libraries whose datasets Phalanx takes, but does not need. TensorFlow 2.21 wants an older h5py than the constraints.
.venv-sources/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-sources
	grep -v '^h5py==' constraints.txt > .venv-sources/constraints.txt
	.venv-sources/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-sources/constraints.txt \
		--editable ".[data,migrate,test]" torch==2.13.0 datasets==5.2.0 tensorflow-cpu==2.21.0 tensorboard==2.21.0
	touch $@

# The compilers for TPUs and GPUs. libtpu has the licence of Google Cloud.
.venv-topologies/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-topologies
	.venv-topologies/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[data,test]" libtpu==0.0.42.*
	.venv-topologies/bin/python -m pip install --quiet --disable-pip-version-check --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2
	touch $@

clean: ## remove the environments and what demos have written
	rm -rf .venv .venv-dist .venv-hub .venv-newest .venv-oldest .venv-sources .venv-topologies out build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache
