# Every target makes what it needs: `make demo` and `make test` work on a bare machine with Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVICES := .venv-trackers
VLLM := .venv-vllm
RAY := .venv-ray
SMOLLM := .venv-smollm
GYM := .venv-environments
VERIFIERS := .venv-verifiers
NEMO_GYM := .venv-nemo-gym
OLDEST := .venv-oldest
MEGATRON := .venv-megatron

.PHONY: demo test nightly nightly-oldest nightly-newest-megatron lint docs contract faults bench clean

demo: $(STAMP)
	$(BIN)/python examples/demo/demo.py

# A worker more than it may use cores (tests/conftest.py), up to 4, which have one thread each; `pytest` alone has none.
# Hundreds of processes import the same modules, so their bytecode is kept, even where the environment says otherwise.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS := -n logical --maxprocesses 4 --dist worksteal

test: $(STAMP)
	$(MAKE) --jobs 2 --output-sync lint docs
	$(PYTEST) $(WORKERS)

# What asks most of other packages, for the oldest of them.
VERSIONS := $(addprefix tests/,config/test_keys.py data/test_sources.py data/test_columns.py files/test_hub.py \
	models/test_attention.py models/test_loading.py engines/test_torch_engine.py engines/megatron/test_layers.py \
	methods/test_training.py tracking check/test_machine.py)

# What is slow and far from training, and more examples of what Hypothesis draws. Run it before an issue ends, and while you work the
# parts that your change touches: `make nightly-PART`. tests/support/parts.py says which files each has.
PARTS := units commands models listed engines megatron layouts rollout runs methods served checkpoints kills gpu pretended trackers vllm ray smollm environments verifiers nemo-gym
NIGHTLY := $(addprefix nightly-,$(PARTS))
PART = files=$$($(BIN)/python tests/support/parts.py $*) && $(subst $(VENV),$(ENVIRONMENT),$(PYTEST)) $$files
ENVIRONMENT := $(VENV)

nightly: $(NIGHTLY) nightly-oldest nightly-newest-megatron

$(NIGHTLY): nightly-%: $(STAMP)
	$(PART) -m '(nightly or hypothesis) and not contract' $(WORKERS)

nightly-pretended nightly-trackers nightly-vllm nightly-ray nightly-smollm nightly-environments nightly-verifiers nightly-nemo-gym: WORKERS :=
nightly-trackers: ENVIRONMENT := $(SERVICES)
nightly-trackers: $(SERVICES)/.installed
nightly-vllm: ENVIRONMENT := $(VLLM)
nightly-vllm: $(VLLM)/.installed
nightly-ray: ENVIRONMENT := $(RAY)
nightly-ray: $(RAY)/.installed
nightly-smollm: ENVIRONMENT := $(SMOLLM)
nightly-smollm: $(SMOLLM)/.installed
nightly-environments: ENVIRONMENT := $(GYM)
nightly-environments: $(GYM)/.installed
nightly-verifiers: ENVIRONMENT := $(VERIFIERS)
nightly-verifiers: $(VERIFIERS)/.installed

# NeMo Gym needs Python 3.13, which the machine may have beside $(PYTHON). Its servers run there; the tests speak to them over HTTP.
PYTHON313 := $(shell for each in $(PYTHON) python3.13 $(HOME)/.pyenv/versions/3.13*/bin/python3.13; do \
	"$$each" -c 'import sys; sys.exit(sys.version_info < (3, 13))' 2> /dev/null && echo "$$each" && break; done)

nightly-nemo-gym: $(if $(PYTHON313),$(NEMO_GYM)/.installed,no-python-3.13)
no-python-3.13:
	@echo "There is no Python 3.13, so NeMo Gym is not tested. Name one: make PYTHON313=PATH nightly-nemo-gym"

nightly-oldest: $(OLDEST)/.installed
	$(subst $(VENV),$(OLDEST),$(PYTEST)) $(WORKERS) $(VERSIONS)

# The newest Megatron-Core needs Python 3.12, which the machine may have beside $(PYTHON).
PYTHON312 := $(shell for each in $(PYTHON) python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python3.12; do \
	"$$each" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null && echo "$$each" && break; done)

nightly-newest-megatron: $(if $(PYTHON312),$(MEGATRON)/.installed)
ifeq ($(PYTHON312),)
	@echo "There is no Python 3.12, so the newest Megatron-Core is not tested. Name one: make PYTHON312=PATH $@"
else
	files=$$(for part in megatron layouts; do $(MEGATRON)/bin/python tests/support/parts.py $$part; done) && \
		$(subst $(VENV),$(MEGATRON),$(PYTEST)) $$files -m 'not contract' $(WORKERS)
endif

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in site/; fails on a broken link.
docs: $(STAMP)
	PYTHONPATH=. $(BIN)/python scripts/reference_pages.py
	$(BIN)/zensical build --strict

CONTRACTS := $(addprefix contract-,units engines megatron layouts)

contract: $(CONTRACTS)

$(CONTRACTS): contract-%: $(STAMP)
	$(PART) -m contract

CAMPAIGNS := $(addprefix faults-,crashes power flips fuzz runs rewards generators mirror)
FAULTS := PYTHONPATH=tests:. OMP_NUM_THREADS=1 $(BIN)/python -m support.faults.campaigns

faults: $(STAMP)
	$(FAULTS)

$(CAMPAIGNS): faults-%: $(STAMP)
	$(FAULTS) --only $*

bench: $(STAMP)
	$(BIN)/python -m bench

$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Burnish needs Python 3.11 or newer; $(PYTHON) is older. Run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable '.[dev,math]'
	@touch $@

# Beside the packages of the environment above: the clients of the services that runs log to, vLLM, Ray, a pretrained model, and environments.
$(SERVICES)/.installed: constraints/trackers.txt
$(VLLM)/.installed: constraints/vllm.txt
$(RAY)/.installed: constraints/ray.txt
$(SMOLLM)/.installed: constraints/smollm.txt
$(GYM)/.installed: constraints/environments.txt
$(VERIFIERS)/.installed: constraints/verifiers.txt
$(VLLM)/.installed $(SMOLLM)/.installed $(GYM)/.installed $(VERIFIERS)/.installed: NO_DEPS := --no-deps
$(SERVICES)/.installed $(VLLM)/.installed $(RAY)/.installed $(SMOLLM)/.installed $(GYM)/.installed $(VERIFIERS)/.installed: $(STAMP)
	$(PYTHON) -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/burnish.pth"
	$(@D)/bin/python -m pip install --quiet $(NO_DEPS) --requirement $(filter constraints/%,$^)
	@touch $@

# The oldest versions that pyproject.toml allows.
$(OLDEST)/.installed: pyproject.toml constraints/oldest.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint constraints/oldest.txt --editable '.[dev,math,liger]'
	@touch $@

# What .venv has, on Python 3.12.
$(MEGATRON)/.installed: pyproject.toml constraints/cpu.txt
	$(PYTHON312) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint constraints/cpu.txt torch==2.13.0
	$(@D)/bin/python -m pip install --quiet --constraint constraints/cpu.txt --editable '.[dev,math]'
	@touch $@

# NeMo Gym 0.7 asks for Python 3.13.14, and runs on older 3.13 too.
$(NEMO_GYM)/.installed: constraints/nemo-gym.txt
	$(PYTHON313) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps --ignore-requires-python --requirement $<
	@touch $@

.PHONY: $(NIGHTLY) $(CONTRACTS) $(CAMPAIGNS) no-python-3.13

clean:
	rm -rf $(VENV) $(SERVICES) $(VLLM) $(RAY) $(SMOLLM) $(GYM) $(VERIFIERS) $(NEMO_GYM) $(OLDEST) $(MEGATRON) .venv-peers .mypy_cache .ruff_cache site
