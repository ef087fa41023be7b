# Everything runs in .venv, which `make` builds once: with the CUDA build of vLLM if nvidia-smi works,
# else with the CPU build. BUILD=cpu or BUILD=cuda overrides the choice. VLLM=0.33 uses that release of
# vLLM, in .venv-0.33.

VENV := .venv$(VLLM:%=-%)
BIN := $(VENV)/bin
BUILD ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$p && break; done)
DEMO := $(VENV)/.demo-$(BUILD)
ALL := $(VENV)/.all-$(BUILD)
SITE := $(VENV)/.docs

# Each engine imports vLLM again, which takes twice as long without bytecode on disk.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo docs figures test nightly fuzz soak gpu lint format clean

# The demo needs fewer packages than the tests, and the site does not need vLLM, so each has a stamp.
# All are installed with uv (install.py).
install: $(ALL)

# pip's list of files is written last, so it is missing if creating the environment was interrupted.
HAS_PIP = $(BIN)/python -c 'import importlib.metadata as it, sys; sys.exit(not it.files("pip"))'

$(DEMO) $(ALL) $(SITE): setup.py install.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.13 is needed; say PYTHON=/path/to/it" >&2; exit 1; }
	@$(HAS_PIP) 2>/dev/null || { echo $(PYTHON) -m venv $(VENV); $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python install.py $(VLLM:%=--vllm=%) $(EXTRAS)
	@rm -f $(filter-out %-$(BUILD),$(wildcard $(VENV)/.demo-* $(VENV)/.all-*))
	@touch $@
$(DEMO): EXTRAS := $(BUILD) demo
$(ALL): EXTRAS := $(BUILD) demo test
$(SITE): EXTRAS := docs

demo: $(DEMO)
	$(BIN)/vllm-mars demo $(ARGS)

# Builds the pages as a site: open build/site/index.html. A dead link or anchor is an error. npm, which
# comes with Node.js, downloads KaTeX into build/ once.
docs: $(SITE)
	$(BIN)/mkdocs build --strict $(ARGS)

# Generates the tables and pictures of the pages from benchmarks/results.
figures: install
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m benchmarks.pictures

# Tests that share an engine run on one worker, and other files run in parallel, by default two at a
# time. On a GPU, which engines would share, all run one after another. Two engines on two cores must
# not spin while they wait: that made both 2.4 times slower. With a single engine the passive policy
# costs time, so timed runs keep the default.
WORKERS ?= $(if $(filter cpu,$(BUILD)),2,0)
PYTEST = $(if $(filter 0,$(WORKERS)),,OMP_WAIT_POLICY=PASSIVE )$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder \
	--durations 20
test: install
	$(PYTEST) --junitxml build/$@$(VLLM:%=-%).xml -m "not nightly" $(ARGS)

# All tests, including exhaustive grids and long-running engines.
nightly: install
	$(PYTEST) --junitxml build/$@$(VLLM:%=-%).xml $(ARGS)

# Tests random steps of the V2 sampler against the oracle. Every night: make fuzz MINUTES=60 SEED=$$RANDOM
MINUTES ?= 10
SEED ?= 0
fuzz: install
	TRITON_INTERPRET=1 PYTHONPATH=.:tests:tests/interpreted $(BIN)/python tests/conformance/fuzz.py --minutes $(MINUTES) --seed $(SEED)

# Runs a hostile client against a real server and checks for leaks. Every night: make soak MINUTES=60
soak: install
	$(BIN)/python tests/soak.py --minutes $(MINUTES) --seed $(SEED)

# Runs everything that needs a GPU, in about ten minutes: make gpu ARGS="--model MODEL --draft DRAFT".
# A failed part does not stop the others, and an interrupted sweep resumes.
PACKAGED := --draft vllm_mars/models/heads/smollm2-135m-eagle3 --server-arg=--dtype=bfloat16
gpu: install
	status=0; \
	$(BIN)/python -m pytest tests/gpu --junitxml build/gpu/tests.xml || status=1; \
	$(BIN)/python -m benchmarks.kernel --output build/gpu/kernel.json || status=1; \
	$(BIN)/vllm-mars sweep --retry-failed --output build/gpu/sweep.jsonl --baseline standard \
		--method autoregressive standard strict mars --concurrency 1 16 \
		--num-prompts 16 --max-tokens 64 $(or $(ARGS),$(PACKAGED)) || status=1; \
	exit $$status

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
