# Everything runs in .venv, which is made where it is missing and renewed when pyproject.toml or constraints.txt change.
PYTHON ?= python3
INSTALLED := .venv/installed

.PHONY: check test faults demo docs clean

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed: name one, as in `make PYTHON=python3.12`' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || \
		{ echo 'Python comes without venv here: install it (Debian: apt-get install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,peers]'
	touch $@

check: $(INSTALLED)  ## linter, types, and the arrows between the rooms
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/pytest tests/test_arrows.py

test: $(INSTALLED)  ## the whole suite: no GPU, no network
	.venv/bin/pytest -n 2

faults: $(INSTALLED)  ## kills, fills and damages runs for half an hour (all of it as root) and writes docs/reliability.md
	.venv/bin/python scripts/faults/all.py

demo: $(INSTALLED)  ## from text to a trained model that writes code, in minutes on two cores
	.venv/bin/python scripts/demo.py

docs: $(INSTALLED)  ## the tables of docs/ that are made from the code
	.venv/bin/python scripts/docs_commands.py
	.venv/bin/python scripts/docs_ops.py
	.venv/bin/python scripts/docs_kernels.py
	.venv/bin/python scripts/docs_experiments.py

clean:  ## the environment and all that the tools left; data/ and runs/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
