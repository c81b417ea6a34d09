# make demo, make test and make lint prepare their environment themselves, once, in $(VENV).
PYTHON ?= python3
VENV ?= .venv
# A file stays on one worker: its tests share compilations.
PYTEST_FLAGS ?= -n 2 --dist loadfile
PIP = $(VENV)/bin/python -m pip -qq --disable-pip-version-check

.PHONY: demo test lint wheel clean

demo: $(VENV)/.demo
	$(VENV)/bin/specjax generate --prompt-file examples/prompt.txt --temperature 0.4 --max-new-tokens 256

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -q $(PYTEST_FLAGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

wheel: $(VENV)/.lint
	$(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist

# A stamp says that an environment holds what pyproject.toml asks for.
$(VENV)/.demo: EXTRAS = flax
$(VENV)/.test: EXTRAS = test
$(VENV)/.lint: EXTRAS = test,lint
$(VENV)/.demo $(VENV)/.test $(VENV)/.lint: pyproject.toml | $(VENV)/bin/pip
	$(PIP) install --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specjax needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name a newer one: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
