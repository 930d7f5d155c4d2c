# make serve   install into .venv and serve the built-in demo model: two replicas, each a tensor-parallel pair
# make test    the same environment, all tests          make lint    ruff, mypy, import-linter
# make bench   the table of figures, and bench.json     make clean   remove the environment and caches
# make soak    ten minutes of streams, aborts and random kills, every invariant on (ARGS="--minutes 60")
# make fuzz-http   an hour of random whole requests beside 31 streams that must not feel them (ARGS="--minutes 5")
# make advisories  asks OSV for known holes in what constraints.txt pins
#
# VENV=path puts the environment elsewhere, PYTHON=path picks the interpreter (3.11 or later),
# EXTRAS=test,lint,gpu adds flash-attn and triton, ARGS="..." is handed to squadron or pytest.

VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= test,lint
BIN := $(abspath $(VENV))/bin
ALONGSIDE := $(addprefix tests/,engine parallel cluster deploy bench clients parity helm)
STAMP := $(VENV)/.installed-$(subst $() ,,$(EXTRAS))

.PHONY: install serve test lint bench soak fuzz-http advisories clean
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

# Tests that start no Ray run side by side; those that do have the machine to themselves, as what they time is real.
test: install
ifdef ARGS
	"$(BIN)/python" -m pytest $(ARGS)
else
	"$(BIN)/python" -m pytest $(ALONGSIDE) --numprocesses 2 --dist loadfile
	"$(BIN)/python" -m pytest $(addprefix --ignore=,$(ALONGSIDE)) --durations=30 --durations-min=10
endif

lint: install
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/lint-imports"

bench: install
	"$(BIN)/python" -m tests.bench $(ARGS)

soak: install
	"$(BIN)/python" -m tests.bench.soak $(ARGS)

fuzz-http: install
	"$(BIN)/python" -m tests.bench.fuzz_http $(ARGS)

advisories: install
	"$(BIN)/python" -m tests.advisories

clean:
	[ ! -f "$(VENV)/pyvenv.cfg" ] || rm -rf "$(VENV)"
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
