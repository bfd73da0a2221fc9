# `make demo` runs the main job on a fresh machine, `make test` passes the tests on one.
PYTHON ?= python3
VENV   ?= .venv
DEMO   ?= .demo
BIN    := $(VENV)/bin
BUNDLE := $(DEMO)/smollm2-135m-instruct
CPP    := $(shell find runtime/cpp exporter -name "*.cpp" -o -name "*.h" -o -name "*.c")

# One thread a worker: two workers fill two cores, and waiting threads would slow the other down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo bench test test-fast test-long cpp cpp-test test-gpu lint format clean ci

demo: $(VENV)/installed
	rm -rf $(BUNDLE)
	$(BIN)/llama-export build "$$($(BIN)/python tests/models.py $(DEMO))" -o $(BUNDLE)
	$(BIN)/llama-export verify $(BUNDLE)
	$(BIN)/llama-export run $(BUNDLE) -p "Why is the sky blue?" --max-new 64 --stats

# The table of BENCHMARKS.md, made anew. Engines that are not installed are listed as not measured; all
# of them: `$(BIN)/pip install -e '.[peers]'`.
bench: $(VENV)/installed-dev
	$(BIN)/python -m tests.benchmarks.table "$$($(BIN)/python tests/models.py $(DEMO))" \
	  --folder $(DEMO)/bench --write BENCHMARKS.md

test: $(VENV)/installed-dev
	$(PYTEST)

test-fast: $(VENV)/installed-dev
	$(PYTEST) -m "not slow"

# A real model in the formats that `make test` leaves out, and its serving entries: in pt2, or in those
# that LLAMA_EXPORT_TEST_FORMATS=pt2,aoti,onnx names.
test-long: $(VENV)/installed-dev
	$(PYTEST) -m long

# The C++ runtime, and its tests against the Python one.
cpp: $(VENV)/installed
	cmake -S runtime/cpp -B build/cpp -DPython3_EXECUTABLE=$(abspath $(BIN)/python)
	cmake --build build/cpp -j 2

cpp-test: $(VENV)/installed-dev
	$(PYTEST) tests/cpp -m "long or not long"

test-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/python artifacts/schema/generate.py --check

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

ci: lint test

clean:
	rm -rf $(VENV) $(DEMO) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
