# Everything here sets itself up: a virtual environment with the dependencies, and the kernels built.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.14.1
export FASTFACT_BUILD

PY := $(VENV)/bin/python
KERNELS := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*)
CXX_SOURCES := $(filter %.cpp %.h %.cu %.cuh,$(KERNELS) $(wildcard tests/ops/*.cpp tests/ops/*.h))

# Tests run in one process a core, each on one thread; what they start reads bytecode. CHECK: what stands for the rest before a commit.
JOBS ?= $(shell nproc)
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
CHECK := tests/test_floors.py tests/base/test_kinds.py tests/nn/test_layers.py tests/ops/test_ops.py tests/federation/wire \
	tests/federation/server/test_mixing.py tests/federation/test_federation.py \
	tests/methods/test_every_method.py::test_a_cohort_computes_what_each_client_alone_does

.PHONY: setup demo test test-oldest test-kernels test-all check docs fuzz fuzz-asan crash-test bench gpu-check gpu-bundle lint format clean
setup: $(VENV)/.installed build/.kernels

demo: setup
	$(PY) -m fastfact compare --config examples/demo.toml --out runs/demo

test: setup
	$(PYTEST)

# With the oldest PyTorch that is supported, in an environment of its own, and the kernels that are there.
test-oldest:
	$(MAKE) test VENV=build/oldest TORCH=torch==2.11.0

# After a change in csrc/ or kernels/: under sanitizers, by other compilers and for other machines, interpreted.
test-kernels: setup
	$(PYTEST) -m kernels

check: lint
	$(PYTEST) -q -x $(CHECK)

# What the suite has samples of as well: every architecture, every way to install.
test-all: setup
	FASTFACT_BUILD=skip $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[surroundings]'
	$(PYTEST) -m ""

# The documentation, in build/site (python -m http.server -d build/site shows it). A warning is an error.
docs: setup
	FASTFACT_BUILD=skip $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

# Random arguments for every public op, files and command lines, for MINUTES each, and the ops once more under
# AddressSanitizer; damage at every system call of small runs (hours).
MINUTES ?= 60
fuzz: setup
	for target in ops files config; do $(PY) -m tests.fuzz $$target --minutes $(MINUTES) || exit 1; done
	FASTFACT_FUZZ=10000 $(PY) -m pytest -q tests/federation/storage/test_fuzz_storage.py
	$(MAKE) fuzz-asan

fuzz-asan: setup
	FASTFACT_SANITIZE=address FASTFACT_BUILD= CUDA_HOME=/nonexistent \
		$(PY) setup.py --quiet build --build-lib build/asan --build-temp build/temp-asan
	PYTHONPATH=build/asan:. LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 $(PY) -P -m tests.fuzz ops --minutes $(MINUTES)

crash-test: setup
	$(PY) tests/federation/storage/crash.py

bench: setup
	$(PY) -m fastfact bench layers --only reconstruct,weight --json bench/results/weights.json

# Uses $(PYTHON) as it is, installs nothing. STEPS: part1 … part3, or single steps (see bench/gpu_check.py).
gpu-check:
	$(PYTHON) -m bench.gpu_check $(STEPS)

# A folder with all that gpu-check needs on a machine where nothing can be built. TRITON_PYTHON: one with the versions of
# Python, PyTorch and triton that are there, to compile the Triton kernels beforehand (see bench/gpu_bundle.py).
gpu-bundle: setup
	$(PY) -m bench.gpu_bundle build/gpu-bundle $(if $(TRITON_PYTHON),--python $(TRITON_PYTHON))

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_SOURCES)

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fastfact needs Python 3.11 or newer (make PYTHON=...)")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch and the other dependencies into $(VENV) (a few minutes the first time)"
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH) torchvision ninja "setuptools>=77" wheel
	FASTFACT_BUILD=skip $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[dev]'
	@touch $@

# One build serves every environment: it takes any PyTorch from the oldest that is supported on.
build/.kernels: setup.py $(KERNELS) | $(VENV)/.installed
	@echo "Building the kernels"
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info fastfact/_*.so
