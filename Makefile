# make serve   install into .venv and serve the built-in demo model: two replicas, each a tensor-parallel pair
# make test    the same environment, all tests          make lint    ruff, mypy, import-linter
# make test-long   what takes too long for every change: long runs, cases that show a thing again, three to five times
#              the examples of properties
# make bench   the table of figures, and bench.json     make clean   remove the environment and caches
# make soak    ten minutes of streams, aborts and random kills, every invariant on (ARGS="--minutes 60")
# make fuzz-http   an hour of random whole requests beside 31 streams that must not feel them (ARGS="--minutes 5")
# make fuzz   an hour of histories of a simulated cluster under faults; what fails is made short (ARGS="--minutes 5")
# make fuzz-engine   an hour of random batches, each request alone in a roomy engine and together in a tight one; what
#              differs is made short (ARGS="--minutes 5 --seed 1")
# make docs   writes the pages of docs/reference that are made from the code
# make advisories  asks OSV for known holes in what constraints.txt pins
#
# VENV=path puts the environment elsewhere, PYTHON=path picks the interpreter (3.11 or later),
# EXTRAS=test,lint,gpu adds flash-attn and triton, ARGS="..." is handed to squadron or pytest.

VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= test,lint
BIN := $(abspath $(VENV))/bin
ALONE := tests/chaos/test_nodes.py tests/chaos/test_serve_process.py tests/e2e/test_gateway.py
WITHOUT_RAY := $(addprefix tests/,engine parallel cluster deploy bench clients parity helm ui docs)
# What a CPU with AVX2 alone computes otherwise, torch and oneDNN included.
AS_AVX2 := tests/engine/kernels/test_onednn.py tests/parity/test_native_attention.py
STAMP := $(VENV)/.installed-$(subst $() ,,$(EXTRAS))

# Tests start hundreds of processes: each would compile this repository anew where bytecode is not kept.
test test-long: export PYTHONDONTWRITEBYTECODE :=

.PHONY: install serve test test-long lint docs bench soak fuzz fuzz-http fuzz-engine advisories clean
.DEFAULT_GOAL := install

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) \
	  else f"Squadron needs Python 3.11 or later, not {v}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --editable '.[$(EXTRAS)]' --constraint constraints.txt
	@touch "$@"

serve: install
	@exec "$(BIN)/squadron" serve demo --replicas 2 --tensor-parallel-size 2 $(ARGS)

# Two processes side by side: first the tests without Ray, file by file, then those with one. Of these, all that share
# one Ray run one after the other in one process, beside those that start a Ray of their own in the other. Three
# files run alone: Ray ends its nodes after 60 s without its control store, whatever else they have to do, and gives up
# a node that has not started after 30 s, which two beside the shared one exceed on two cores; and the time that streams
# get at a stop is real.
test: install
ifdef ARGS
	"$(BIN)/python" -m pytest $(ARGS)
else
	"$(BIN)/python" -m pytest $(WITHOUT_RAY) --numprocesses 2 --dist loadfile --durations=20 --durations-min=5
ifeq ($(shell uname -m),x86_64)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 SQUADRON_CPU_ISA=avx2 "$(BIN)/python" -m pytest $(AS_AVX2)
endif
	"$(BIN)/python" -m pytest $(addprefix --ignore=,$(WITHOUT_RAY) $(ALONE)) --numprocesses 2 --dist loadfile \
	  --no-loadscope-reorder --durations=40 --durations-min=5
	"$(BIN)/python" -m pytest $(ALONE)
endif

# Long runs with Ray have the machine to themselves, as what they time is real.
test-long: install
	"$(BIN)/python" -m pytest $(WITHOUT_RAY) -m "long or not long" --hypothesis-profile=long --timeout=1800 \
	  --numprocesses 2 --dist loadfile
	"$(BIN)/python" -m pytest $(addprefix --ignore=,$(WITHOUT_RAY)) -m "long or not long" --timeout=1800

lint: install
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/lint-imports"

docs: install
	"$(BIN)/python" -m tests.docs

bench: install
	"$(BIN)/python" -m tests.bench $(ARGS)

soak: install
	"$(BIN)/python" -m tests.bench.soak $(ARGS)

fuzz: install
	"$(BIN)/python" -m tests.simulator --minutes 60 $(ARGS)

fuzz-http: install
	"$(BIN)/python" -m tests.bench.fuzz_http $(ARGS)

fuzz-engine: install
	"$(BIN)/python" -m tests.bench.fuzz_engine $(ARGS)

advisories: install
	"$(BIN)/python" -m tests.advisories

clean:
	[ ! -f "$(VENV)/pyvenv.cfg" ] || rm -rf "$(VENV)"
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
