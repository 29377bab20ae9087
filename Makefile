# Nothing has to be set up by hand: every target makes .venv from the pinned constraints first. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm

.PHONY: help setup setup-vllm demo test test-vllm test-vllm-engine test-vllm-newest lint types docs bench clean
.DEFAULT_GOAL := help

help: ## list what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/    make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: $(READY) ## the environment in .venv, from pinned versions

# The extension compiles, for minutes of one core, while the other downloads what the package needs; what of that is
# imported, Python compiles then. The extension is built with the pinned setuptools, and again when its source has
# changed: every process with a fresh cache would compile a stale one.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Clients that pin other versions lie in a folder of their own, for the tests that run them.
$(READY): pyproject.toml constraints.txt constraints-clients.txt setup.py src/qbe/kernels/cpu/source.py $(wildcard src/qbe/kernels/cpu/*.c src/qbe/kernels/cpu/*/*.c)
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	$(BIN)/python setup.py --quiet build_ext --inplace > $(VENV)/build.log 2>&1 & compiling=$$!; \
	trap 'kill $$compiling 2> /dev/null' EXIT; \
	$(BIN)/python scripts/requirements.py dev > $(VENV)/requirements.txt && \
	$(PIP) torch && $(PIP) -r $(VENV)/requirements.txt && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade \
	  --target $(VENV)/clients -r constraints-clients.txt && \
	wait $$compiling && trap - EXIT || { cat $(VENV)/build.log; exit 1; }
	$(PIP) --no-build-isolation --no-deps -e .
	touch $(READY)

# vLLM for the CPU in an environment of its own: it pins other versions. The list is complete, so that nothing is
# resolved, and torch's companions that it asks for, but does not need, stay away. The newest vLLM has no build for CPUs:
# its source lies beside it, and what can be tested of the plug-in without running an engine is.
setup-vllm: $(VLLM)/.ready ## the environment for the tests inside vLLM

$(VLLM)/.ready: pyproject.toml constraints-vllm.txt setup.py src/qbe/kernels/cpu/source.py $(wildcard src/qbe/kernels/cpu/*.c src/qbe/kernels/cpu/*/*.c)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(VLLM)/bin/python -m pip download --quiet --no-deps --dest $(VLLM)/newest vllm==0.33.0
	cd $(VLLM)/newest && $(PYTHON) -c "import glob, zipfile; wheel = zipfile.ZipFile(glob.glob('*.whl')[0]); wheel.extractall('.', [n for n in wheel.namelist() if n.endswith('.py')])" && rm *.whl
	touch $@

demo: setup ## the default model answers three prompts
	GOMP_SPINCOUNT=0 $(BIN)/python examples/demo.py

test: setup ## every test that needs no GPU
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-vllm: test-vllm-engine test-vllm-newest ## the tests inside vLLM

test-vllm-engine: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/inside_vllm

test-vllm-newest: setup-vllm
	PYTHONPATH=$(VLLM)/newest $(VLLM)/bin/python -m pytest tests/inside_vllm/test_vllm_parts.py tests/inside_vllm/test_vllm_seams.py

lint: setup ## ruff, codespell, and that imports between folders point down
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports

types: setup ## mypy
	$(BIN)/mypy

docs: setup ## the documentation as a site in build/site, links checked
	$(BIN)/python scripts/docs_reference.py docs/reference
	$(BIN)/zensical build --clean --strict --config-file mkdocs.yml

bench: setup ## every benchmark of one machine
	$(BIN)/python benchmarks/analysis.py
	for what in linears decode prefill switch batch kv; do $(BIN)/qbe bench $$what || exit 1; done

clean: ## remove environments and builds
	rm -rf $(VENV) $(VLLM) build dist src/*.egg-info
