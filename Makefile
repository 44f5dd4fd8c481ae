# make demo · make test · make bench · make lint · make test-long
# Each target makes .venv with what it needs first; repeat runs skip what is done.

PYTHON ?= python3
PIP = .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-long bench lint clean

demo: .venv/.core
	.venv/bin/streamclr demo

test: .venv/.dev
	.venv/bin/pytest -n 2 --dist loadfile

test-long: .venv/.dev
	.venv/bin/pytest -m long

bench: .venv/.dev
	.venv/bin/streamclr data get cifar10 || true
	.venv/bin/python benchmarks/bench.py

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.core: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@ .venv/.core

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
