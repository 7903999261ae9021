# One entry point for people and CI. Every target creates what it needs in .venv and .cache, and
# second runs reuse it. PYTHON names the interpreter to build the environment with.
PYTHON ?= python3
ARGS ?=
N ?= 300
SEED ?=
MINUTES ?= 10
SOAK ?= build/soak

BIN := .venv/bin
SETUP := $(PYTHON) scripts/setup_env.py
MODEL := .cache/smollm2-fp32

.DEFAULT_GOAL := help
.PHONY: help venv vllm model demo test test-fast crashtest soak lint format metrics-table schemas bench wheel clean distclean

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do printf '%-13s %s\n' "$$name" "$$text"; done

venv: ## Create .venv with kvstore and the development tools
	@$(SETUP) dev

vllm: ## Add the CPU build of vLLM to .venv
	@$(SETUP) vllm

model: ## Add vLLM and the demo's model weights
	@$(SETUP) model

demo: model ## Show a real vLLM engine loading from kvstore what it had computed before
	@$(BIN)/python -m kvstore demo --model $(MODEL) $(ARGS)

test: model ## Run every test, real vLLM engines included (about 15 minutes)
	@$(BIN)/python -m pytest $(ARGS)

test-fast: venv ## Run the tests that need no vLLM
	@$(BIN)/python -m pytest -m "not vllm" $(ARGS)

crashtest: venv ## Kill the store N times (300), cut its power and damage it N/10 times; SEED=... repeats a run
	@PYTHONPATH=$(CURDIR) $(BIN)/python tests/crash/crashtest.py --kills $(N) \
		--power-losses $$(($(N) / 10)) --damages $$(($(N) / 10)) $(if $(SEED),--seed $(SEED))

soak: venv ## Load a daemon for MINUTES=10, report into SOAK=build/soak whether anything grew
	@$(BIN)/python tests/soak/soak.py --minutes $(MINUTES) --out $(SOAK) --command "make soak MINUTES=$(MINUTES)" $(ARGS)

lint: venv ## Run ruff, mypy and import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: venv ## Reformat the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

metrics-table: venv ## Write the table of docs/metrics.md anew
	@PYTHONPATH=$(CURDIR) $(BIN)/python -c "import pathlib, kvstore.server.metric_series as m; m.write(pathlib.Path('docs/metrics.md'))"

schemas: venv ## Write docs/schemas and the table of docs/json.md anew
	@PYTHONPATH=$(CURDIR) $(BIN)/python scripts/schemas/write_schemas.py

bench: venv ## Measure the data path on this machine
	@$(BIN)/python -m kvstore bench $(ARGS)

wheel: venv ## Build dist/*.whl
	@$(BIN)/python -m build --wheel --no-isolation

clean: ## Remove what builds and tools left behind
	@rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv and .cache too
	@rm -rf .venv .cache
