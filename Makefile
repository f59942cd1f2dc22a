# Every target does its own set-up: each works as the first command on a machine that has Python 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTOS := $(wildcard protos/slipstream/v1/*.proto)
SERVICES := $(filter-out %/types.proto,$(PROTOS))

# One torch thread for each process: threads over cores are ruinous. gRPC's chatter helps nobody.
export OMP_NUM_THREADS := 1
export GRPC_VERBOSITY := ERROR

.PHONY: setup demo serve test test-all chaos simulation images lint audit format protos bench equality clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), torch included: some minutes the first time."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m examples.demo

serve: setup
	$(BIN)/slipstream serve

# Two files at a time, slow ones first: most tests wait for other processes, or for time to pass.
test: setup
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-all: setup
	$(BIN)/python -m pytest -q

chaos: setup
	$(BIN)/python -m pytest -q -s tests/chaos

SEEDS ?= 1000
simulation: setup
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs 2

ENGINE ?= docker
VERSION ?= 0.1.0
BUILD ?=
images:
	for role in gateway drafter verifier; do \
		$(ENGINE) build $(BUILD) --target $$role -t slipstream/$$role:$(VERSION) -f docker/Dockerfile . || exit 1; \
	done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	sh tools/buf lint

audit: setup
	sh tools/audit

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -Iprotos --grpc_python_out=. $(SERVICES)

bench: setup
	$(BIN)/python -m benchmarks.links
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.pair

equality: setup
	$(BIN)/python -m benchmarks.equality

clean:
	rm -rf $(VENV) .cache .tools .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
