# Everything a user or CI runs. Targets create .venv themselves and reuse it; `make` alone lists them.
CONFIG ?= a100-int4.yaml
PROMPT ?= def quicksort(
export PROMPT
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help engine serve query plan validate status test test-thorough test-slow check checkpoints smollm2 bench lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): requirements.lock pyproject.toml
	@test -x $(BIN)/python || echo "installing into $(VENV): about 2 GB, some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --editable .
	touch $@

engine: $(READY) ## run every stage of CONFIG=a100-int4.yaml that is not cached; RESUME=… takes an engine built elsewhere
	$(BIN)/trtseek engine "$(CONFIG)" $(if $(RESUME),--resume "$(RESUME)")

serve: $(READY) ## serve CONFIG with Triton until Ctrl-C, made first if it is not there
	$(BIN)/trtseek serve "$(CONFIG)"

query: $(READY) ## ask the running server: make query PROMPT="def quicksort("
	$(BIN)/trtseek query "$$PROMPT"

plan: $(READY) ## say what `make engine CONFIG=…` would run, and whether it fits the GPU
	$(BIN)/trtseek plan "$(CONFIG)"

validate: $(READY) ## check CONFIG against its schema, its model and its target
	$(BIN)/trtseek validate "$(CONFIG)"

status: $(READY) ## say which stages of CONFIG are done
	$(BIN)/trtseek status "$(CONFIG)"

test: $(READY) ## run the tests
	GOMP_SPINCOUNT=0 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test-thorough: $(READY) ## run more cases of what `make test` tries some of
	GOMP_SPINCOUNT=0 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "thorough and not slow"

test-slow: $(READY) ## run the tests that take minutes or download a package
	GOMP_SPINCOUNT=0 $(BIN)/pytest -m slow

check: $(READY) ## lint, formatting and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

checkpoints: $(READY) ## train the two tiny checkpoints again (about an hour)
	nice -n 10 $(BIN)/python -m checkpoints.train

smollm2: $(READY) ## make out/models/smollm2-135m, a real model that answers in English
	$(BIN)/python -m checkpoints.smollm2

bench: $(READY) ## measure the main figures of benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.commands
	$(BIN)/python -m benchmarks.interpreter
	$(BIN)/python -m benchmarks.build
	GOMP_SPINCOUNT=0 $(BIN)/python -m benchmarks.quantization

lock: $(READY) ## write requirements.lock from what is installed in .venv
	{ head -1 requirements.lock; $(BIN)/pip freeze --exclude-editable | sed "s/+cpu$$//"; } > requirements.new && mv requirements.new requirements.lock

clean: ## remove what runs produced (out/); keeps .venv
	rm -rf out .pytest_cache .mypy_cache .ruff_cache
