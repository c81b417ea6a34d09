# make demo, make test and make lint prepare their environment themselves, once, in $(VENV).
PYTHON ?= python3
VENV ?= .venv
# A file stays on one worker: its tests share compilations.
PYTEST_FLAGS ?= -n 2 --dist loadfile
PIP = $(VENV)/bin/python -m pip -qq --disable-pip-version-check

# A Python that sees an NVIDIA GPU, with jax, pytest, chex, hypothesis and scipy.
PYTHON_GPU ?= python3

.PHONY: demo test gpu-test gpu-sanitize lint wheel clean

demo: $(VENV)/.demo
	$(VENV)/bin/specjax generate --prompt-file examples/prompt.txt --temperature 0.4 --max-new-tokens 256

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -q $(PYTEST_FLAGS)

# The kernels' own tests, and the whole battery on "triton", in as many processes as share a GPU well.
# Each fails where there is no GPU, and where none of its tests ran. GPU_FLAGS=-x stops at a fault.
GPU_TESTS = tests/pallas/test_gpu.py tests/pallas/test_gpu_laws.py tests/test_laws.py \
	tests/test_edges.py tests/test_verify.py,tests/test_ragged.py \
	tests/test_sampling.py,tests/test_transforms.py

gpu-test:
	@running=; for files in $(GPU_TESTS); do \
		SPECJAX_GPU_TEST=1 XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON_GPU) -m pytest -q -rs -m gpu \
			-p no:cacheprovider --durations=5 $(GPU_FLAGS) $$(echo $$files | tr , ' ') & running="$$running $$!"; \
	done; failed=0; for one in $$running; do wait $$one || failed=1; done; exit $$failed

gpu-sanitize:
	PYTHON=$(PYTHON_GPU) tests/gpu_sanitizer.sh

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
