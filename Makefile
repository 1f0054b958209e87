# `make demo` and `make test` each work from a fresh clone: they build .venv first if it is not there,
# and again when pyproject.toml or constraints.txt change. Python 3.11 or later is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
TRITON := triton==3.6.0
JOBS ?= 2
DEMO := runs/demo
SEEDS ?= 0,1,2
comma := ,
EACH_SEED := $(subst $(comma), ,$(SEEDS))
COMMAND := $(BIN)/path-attention
# Threads that wait for one another by spinning cost a busy machine most of its time.
export GOMP_SPINCOUNT := 5000

.NOTPARALLEL:
.PHONY: help test lint format demo demo-tasks seeds clean

help:
	@echo "make demo         train two small models on this machine's CPU and compare them (10 minutes)"
	@echo "make demo-tasks   a small flip-flop: PaTH beside RoPE (5 minutes)"
	@echo "make test         the whole test suite"
	@echo "make lint         ruff and pyright"
	@echo "make seeds        the demo for SEEDS=0,1,2 and its result in results/"
	@echo "make clean        remove what the others made, runs/ apart"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: needs Python 3.11 or later, $(PYTHON) is older; say make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)" --constraint constraints.txt
	$(BIN)/pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@if [ "$$(uname)" = Linux ] && ! $(BIN)/python -c 'import triton' 2>/dev/null; then \
	  $(BIN)/pip install --quiet $(TRITON) --constraint constraints.txt; fi
	@touch $@

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

define PROMPT
def read_lines(path, encoding="utf-8"):
    """Return the lines of a text file as a list."""
    with open(path
endef
export PROMPT

# Trains a PaTH and a RoPE model on Python's own standard library, measures both up to 16 times the
# training length, and lets the PaTH model go on with a function. Interrupted, it goes on where it was.
demo: demo-seed-0
	@printf '\n%s\n\n' "The PaTH model goes on with a function:"
	@$(COMMAND) generate $(DEMO)/seed0/path --prompt "$$PROMPT" --max-new-tokens 100 \
	  --temperature 0.5
	@printf '\n%s\n' "Figure: $(DEMO)/seed0/perplexity.png"

demo-seed-%: $(STAMP)
	$(COMMAND) train demo_path --seed $* --data.corpus $(DEMO)/corpus --out $(DEMO)/seed$*/path
	$(COMMAND) train demo_rope --seed $* --data.corpus $(DEMO)/corpus --out $(DEMO)/seed$*/rope
	$(COMMAND) evaluate perplexity $(DEMO)/seed$*/path $(DEMO)/seed$*/rope --data $(DEMO)/corpus \
	  --lengths 256,512,1024,2048,4096 --windows 32 --out $(DEMO)/seed$*/perplexity

# Trains PaTH and RoPE on a small flip-flop, two seeds each, one encoding a core, and prints their
# errors. Interrupted, it goes on where it was.
demo-tasks: $(STAMP)
	$(COMMAND) task sweep --grids demo --out runs/demo-tasks --workers.devices cpu \
	  --workers.each 2 --workers.threads 1
	$(COMMAND) task report --out runs/demo-tasks --to runs/demo-tasks/report

# The demo's two curves over several training seeds, for results/.
seeds: $(EACH_SEED:%=demo-seed-%)
	$(COMMAND) evaluate merge $(EACH_SEED:%=$(DEMO)/seed%/perplexity.json) \
	  --out results/demo_perplexity_by_length --command 'make seeds SEEDS=$(SEEDS)'

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find path_attention tests -name __pycache__ -type d -prune -exec rm -rf {} +
