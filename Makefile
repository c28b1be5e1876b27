# One way to do each task. Each target makes the virtual environment and installs what it needs.
# Variables: PYTHON, the interpreter that makes .venv (3.11 or newer); JOBS, the number of test processes; PEERS=1, install the peers
# that benchmarks measure when they are there; LOG, what benchmarks printed on another machine; PORT, STORE (a directory or a
# postgresql:// URL) and MODEL of the server; PG_REQUIRED=1 and CHROMIUM_REQUIRED=1, tests that need PostgreSQL or Chromium fail
# where it is not installed, instead of being skipped.

PYTHON ?= python3
JOBS ?= 2
PORT ?= 8000
MODEL ?= tiny-qwen2.5-vl
STORE ?= .sessions-$(MODEL)

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt
CHECKED := sessiontree engine_bridge $(wildcard tests examples benchmarks)
# One thread for each test process: several with a thread for every core each only get in each other's way.
# What Python compiles is kept, whatever the shell says: every process of the run reads it again, and so does the next run.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Every script of benchmarks/ but gpu_packing.py, which is for a GPU.
BENCHMARKS := tree contention growth positions packing page_hashes gpu_bridge durable health health_gc health_bundles health_cli \
    sglang_sessions scheduler serving trajectories interchange postgres viewer

.DEFAULT_GOAL := help
.PHONY: help demo serve test cover check types bench bench-report soak postgres chromium docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile

demo: .venv/demo.stamp ## run the main job on real input: examples/quickstart.py
	$(BIN)/python examples/quickstart.py

serve: .venv/serve.stamp ## serve a tiny model over HTTP, its sessions on disk; PORT, STORE, MODEL
	OMP_NUM_THREADS=1 PYTHONPATH=examples $(BIN)/python -m mini_scheduler --port $(PORT) --store $(STORE) --model $(MODEL)

test: .venv/dev.stamp .venv/sglang.stamp .venv/vllm.stamp ## run the tests
	$(PYTEST)

cover: .venv/dev.stamp .venv/sglang.stamp .venv/vllm.stamp ## run the tests and show their coverage, in twice the time
	$(PYTEST) --cov --cov-report=term-missing:skip-covered

check: .venv/dev.stamp ## lint, formatting, types and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CHECKED)
	$(BIN)/lint-imports

# From outside of the repository, where pyright sees the packages as whoever installs them does.
types: .venv/types.stamp ## let pyright say whether the type of every public name is complete
	@cd $(BIN) && for package in sessiontree engine_bridge; do \
	    PATH="$$PWD:$$PATH" PYRIGHT_PYTHON_IGNORE_WARNINGS=1 ./pyright --verifytypes $$package --ignoreexternal > ../types.txt \
	        || { cat ../types.txt; exit 1; }; \
	    echo "$$package: $$(grep completeness ../types.txt)"; done

bench: $(if $(PEERS),.venv/peers.stamp .venv/sglang.stamp .venv/vllm.stamp) .venv/dev.stamp ## measure: tables, and one line of JSON for each figure; PEERS=1 adds LangGraph, openai-agents, SGLang
	@missed=0; for part in $(BENCHMARKS); do PYTHONPATH=. $(BIN)/python benchmarks/$$part.py || missed=1; done; exit $$missed

# What needs PostgreSQL or Chromium is not measured without (make postgres, make chromium), and the page says so. It exits with 1
# where a bar is missed. LOG: what gpu_bridge.py and gpu_packing.py printed on a machine with a GPU.
bench-report: .venv/peers.stamp .venv/sglang.stamp .venv/vllm.stamp .venv/dev.stamp ## measure beside all peers, 15 to 20 minutes, and write docs/benchmarks.md; LOG=file adds another machine's
	$(BIN)/python benchmarks/report.py $(if $(LOG),--add $(LOG)) $(BENCHMARKS:=.py)

soak: .venv/dev.stamp .venv/sglang.stamp .venv/vllm.stamp .venv/tools.stamp ## run every test, the long ones too, at soak length, on new random histories; other tools write files and read ours
	SESSIONTREE_VERIFIERS=$(call tool,verifiers/bin/python) SESSIONTREE_HARBOR=$(call tool,harbor/bin/python) \
	    SESSIONTREE_PI=$(call tool,node/node_modules/@earendil-works/pi-coding-agent) \
	    SESSIONTREE_NODE=$(call tool,node/node_modules/.bin/node) \
	    SESSIONTREE_CLAUDE_CODE=$(call tool,node/node_modules/@anthropic-ai/claude-code-*/claude) \
	    SESSIONTREE_SOAK=1 $(PYTEST) -m ""

# The tests start a server of their own: all that they need is the programs.
postgres: .venv/dev.stamp ## install PostgreSQL where it is missing, by apt-get, as root
	@$(BIN)/python -m tests.postgres_server || { \
	    apt-get update --quiet --quiet && DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends postgresql; }

# The tests drive it headless; its fonts come with it.
chromium: .venv/dev.stamp ## install Chromium where it is missing, by apt-get, as root
	@$(BIN)/python -m tests.browser || { \
	    apt-get update --quiet --quiet && DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends chromium; }

# Its warning is about mkdocs 2, which pyproject.toml leaves out.
docs: .venv/docs.stamp ## build the documentation as a site, build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean: ## remove all that these targets made
	rm -rf .venv .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says that its step succeeded. A step that failed leaves none, so the next run does it again.
.venv/made.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "sessiontree needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)" >&2; \
	    echo "Name a newer one, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@touch $@

# The build tools are installed first, pinned, so that the build needs no environment of its own.
.venv/demo.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

.venv/docs.stamp: .venv/made.stamp pyproject.toml constraints.txt
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

.venv/types.stamp: .venv/dev.stamp
	$(PIP) --no-build-isolation --editable '.[demo,dev,types]'
	@touch $@

.venv/serve.stamp: .venv/demo.stamp
	$(PIP) --no-build-isolation --editable '.[serve]'
	@touch $@

.venv/peers.stamp: .venv/demo.stamp
	$(PIP) --no-build-isolation --editable '.[demo,peers]'
	@touch $@

# SGLang's own code judges ours where it can be had; the tests say so where not.
.venv/sglang.stamp: .venv/dev.stamp
	@$(PIP) --no-deps sglang==0.5.23 && $(PIP) --no-build-isolation --editable '.[sglang-tests]' && touch $@ || echo "sglang 0.5.23 cannot be installed here; what needs it is skipped" >&2

# vLLM's own classes and hash functions judge ours: its Python files (a download of 47 MB), nothing compiled, no dependencies but
# what those files need, and what their build needs. CARGO: it does without the server in Rust that it then cannot build.
.venv/vllm.stamp: .venv/dev.stamp
	@$(PIP) cachetools cbor2 msgspec pydantic requests && \
	    $(PIP) setuptools setuptools-rust setuptools-scm && \
	    CARGO=none VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 \
	    $(PIP) --no-deps --no-build-isolation --no-compile --no-binary vllm vllm==0.33.0 && touch $@ || \
	    echo "vllm 0.33.0 cannot be installed here; what needs it is skipped" >&2

# Tools whose files `import` and `export` know: each writes and reads them itself where it can be had, some in an environment of
# their own. The tests of those that are not there are skipped. Of harbor the models alone are used, which do with an older Python.
TOOLS := .venv/tools
tool = $(abspath $(firstword $(wildcard $(TOOLS)/$(1))))

.venv/tools.stamp: .venv/dev.stamp
	@$(PIP) langgraph openai-agents || echo "langgraph and openai-agents cannot be installed here; what needs them is skipped" >&2
	@$(PYTHON) -m venv --clear $(TOOLS)/verifiers && \
	    $(TOOLS)/verifiers/bin/python -m pip install --quiet --quiet verifiers==0.4.0 || { \
	    rm -rf $(TOOLS)/verifiers; echo "verifiers cannot be installed here; what needs it is skipped" >&2; }
	@$(PYTHON) -m venv --clear $(TOOLS)/harbor && \
	    $(TOOLS)/harbor/bin/python -m pip install --quiet --quiet pydantic && \
	    $(TOOLS)/harbor/bin/python -m pip install --quiet --quiet --no-deps --ignore-requires-python harbor==0.26.0 || { \
	    rm -rf $(TOOLS)/harbor; echo "harbor cannot be installed here; what needs it is skipped" >&2; }
	@npm install --silent --no-fund --no-audit --prefix $(TOOLS)/node \
	    @earendil-works/pi-coding-agent@1.6.0 node@22.23.3 @anthropic-ai/claude-code@2.1.197 || { \
	    rm -rf $(TOOLS)/node; echo "pi and Claude Code cannot be installed here (npm); what needs them is skipped" >&2; }
	@touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(PIP) --no-build-isolation --editable '.[demo,dev]'
	@touch $@
