# make demo · make docs · make lint · make test · make test-system · make test-long · make bench · make bench-peers
# Each target makes .venv with what it needs first; repeat runs skip what is done.

PYTHON ?= python3
PIP = .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo docs test test-system test-long bench bench-peers lint screenshots clean

demo: .venv/.core
	.venv/bin/streamclr demo

# A site in build/site, which asks no other host for anything. The variable keeps the theme from announcing another product.
docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# Before every commit: minutes, no browser.
test: .venv/.dev
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 --dist worksteal -m 'not system and not long' --durations 15

# By file: what the tests of a file share (a job of ranks, Ray, a finished run) takes longer to make than a test.
test-system: .venv/.dev .venv/.chromium .venv/.mosquitto
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 --dist loadfile -m 'system and not long' --durations 15

test-long: .venv/.dev .venv/.chromium .venv/.mosquitto
	.venv/bin/pytest -m long

bench: .venv/.dev
	.venv/bin/streamclr data get cifar10 || true
	.venv/bin/python benchmarks/bench.py

# In a venv of its own, because lightly brings packages that must not change .venv.
bench-peers: .venv/.dev
	.venv/bin/python benchmarks/peers.py

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

screenshots: .venv/.dev .venv/.chromium
	CLIPS=$(CLIPS) .venv/bin/python tests/screenshots.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.core: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@ .venv/.core

# For the tests of the pages, which are skipped where it cannot be had.
.venv/.chromium: .venv/bin/python
	command -v chromium > /dev/null || command -v google-chrome > /dev/null || (export DEBIAN_FRONTEND=noninteractive; \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo -n); \
	  $$SUDO apt-get install -y -q chromium || ($$SUDO apt-get update -q && $$SUDO apt-get install -y -q chromium)) \
	  > .venv/chromium.log 2>&1 && touch $@ || echo "no Chromium (see .venv/chromium.log): the tests of the pages are skipped"

# A real MQTT broker. Debian starts it as a service unless that is masked; the tests start their own.
.venv/.mosquitto: .venv/bin/python
	command -v mosquitto > /dev/null || test -x /usr/sbin/mosquitto || (export DEBIAN_FRONTEND=noninteractive; \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo -n); $$SUDO ln -sf /dev/null /etc/systemd/system/mosquitto.service; \
	  $$SUDO apt-get install -y -q mosquitto || ($$SUDO apt-get update -q && $$SUDO apt-get install -y -q mosquitto)) \
	  > .venv/mosquitto.log 2>&1 && touch $@ || echo "no mosquitto (see .venv/mosquitto.log): the tests of MQTT are skipped"

clean:
	rm -rf .venv .venv-peers artefacts build/site .pytest_cache .mypy_cache .ruff_cache .hypothesis
