# `make demo` and `make test` need nothing set up by hand: they make .venv from the pinned constraints first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm

.PHONY: setup setup-vllm demo test test-vllm lint types bench clean

setup: $(READY)

# Without build isolation, so that the extension is built with the pinned setuptools. Again when its source has changed:
# a stale extension is compiled anew, for a minute or more, by every process with a fresh cache.
$(READY): pyproject.toml constraints.txt setup.py src/qbe/kernels/cpu/source.py $(wildcard src/qbe/kernels/cpu/*.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(READY)

# vLLM for the CPU in an environment of its own: it pins other versions. The list is complete, so that nothing is
# resolved, and torch's companions that it asks for, but does not need, stay away.
setup-vllm: $(VLLM)/.ready

$(VLLM)/.ready: pyproject.toml constraints-vllm.txt setup.py src/qbe/kernels/cpu/source.py $(wildcard src/qbe/kernels/cpu/*.c)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-vllm: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/inside_vllm

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/analysis.py
	for what in linears decode prefill switch batch kv; do $(BIN)/qbe bench $$what || exit 1; done

clean:
	rm -rf $(VENV) $(VLLM) build dist src/*.egg-info
