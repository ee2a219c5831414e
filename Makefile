# `make help` lists the targets. Each of them first sets up .venv if that has not been done yet.
# Set pip's options, such as an index with CPU-only wheels of torch, with its PIP_* variables.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.set-up-done
# The demos need a third of the packages; where all are installed, they need nothing else.
DEMO_STAMP := $(VENV)/.demo-set-up-done
DEMO_READY := $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
# Tried in this order; the first one that is new enough creates .venv.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10
# constraints.txt stays at this release of torch, even if a newer one exists.
TORCH := 2.13.0
PYTEST_ARGS :=
# Ranks wait for each other for a third of the time: three test files in parallel take a fifth less time on two cores.
TEST_WORKERS := 3
# Workers keep the bytecode of test files, even where Python is told to write none: each would compile them all again.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
OLDEST_ARGS :=
DEMO_ARGS :=
ELASTIC_DEMO_ARGS :=
COMPARE_ARGS :=
NEWCOMER_ARGS :=
GPU_ARGS :=

.PHONY: help demo elastic-demo compare test test-fast test-pytorch-lightning test-oldest check audit release wheel-test bench gpu-check constraints newcomer-test docs clean

help:
	@echo "make demo         set up, then train a small GPT-2 on two CPU processes (DEMO_ARGS='trainer.max_steps=200')"
	@echo "make elastic-demo  set up, then kill, drain and restart replicas in mid-fit, a few minutes (ELASTIC_DEMO_ARGS='--help')"
	@echo "make compare      set up, then train the same model under every strategy and write a page (COMPARE_ARGS='seed=2')"
	@echo "make test         set up, then run the tests (PYTEST_ARGS='-k bits')"
	@echo "make test-fast    set up, then run the tests without a Trainer: under two minutes, for use while you work"
	@echo "make test-pytorch-lightning  set up, then run tests with pytorch_lightning in place of lightning, a minute"
	@echo "make test-oldest  install the oldest supported torch and Lightning, and run tests with them, some minutes"
	@echo "make check        set up, then lint, format, types, import contracts, spelling"
	@echo "make audit        set up, then check the pinned releases for known vulnerabilities, under a minute"
	@echo "make wheel-test   set up, then build the wheel and train with it in an empty environment, some minutes"
	@echo "make docs         set up, then build the documentation into build/site; no network, and a broken link fails"
	@echo "make release      set up, then build wheel and sdist into dist/, and check them and the rendered README"
	@echo "make newcomer-test  run the documented commands in a fresh clone: demo, two machines, fine-tuning, docs"
	@echo "make bench        set up, then run the benchmarks that this machine can run, about an hour, and write their pages"
	@echo "make gpu-check    set up, then check correctness and cost on a GPU, half an hour (call again to continue), and write build/gpu_check.md"
	@echo "make constraints  resolve constraints.txt again from pyproject.toml (UPGRADE=1: with the newest releases)"
	@echo "make clean        remove .venv, builds and caches, but not the outputs of recipes"

# OMP_NUM_THREADS=1: the ranks of one machine share its cores, and waiting OpenMP threads would spin on them.
demo: $(DEMO_READY)
	OMP_NUM_THREADS=1 $(PY) -m recipes.pretrain experiment=demo $(DEMO_ARGS)

# The page in benchmarks/ names the commit that made it; this one is a trial.
elastic-demo: $(DEMO_READY)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.elastic_demo --page build/elastic_demo.md $(ELASTIC_DEMO_ARGS)

# The settings fit a run this short, as the demo's do.
compare: $(DEMO_READY)
	OMP_NUM_THREADS=1 $(PY) -m recipes.compare trainer.max_steps=600 trainer.val_check_interval=100 \
	  'overrides.streaming_diloco={strategy.sync_every:20}' $(COMPARE_ARGS)

test: $(STAMP)
	$(TEST_ENV) $(PY) -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

# comm, two algorithms and the planner, without their slowest files: measured one by one, these took half the time.
FAST_TESTS := tests/planner tests/comm tests/lion tests/diloco
FAST_LEFT_OUT := cuda_walk frozen voting_ranks liveness finish ballot_exchange

test-fast: $(STAMP)
	$(TEST_ENV) $(PY) -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile $(FAST_TESTS) \
	  $(FAST_LEFT_OUT:%=--ignore-glob='*/test_%*') $(PYTEST_ARGS)

# Fits, resumes and stops of the three strategies, and every private name of Lightning.
PYTORCH_LIGHTNING_TESTS := tests/test_internals.py tests/resume/test_resume.py $(addprefix tests/fit/test_, \
  domino_tp.py lion_fit.py sigterm_forked.py stopping.py streaming_diloco.py)

test-pytorch-lightning: $(STAMP)
	COMMFREE_HOST=pytorch_lightning $(TEST_ENV) $(PY) -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile \
	  $(PYTORCH_LIGHTNING_TESTS) $(PYTEST_ARGS)

# On a machine that cannot install them, it prints the reason and exits with 0.
test-oldest: $(STAMP)
	$(PY) .ci/oldest $(OLDEST_ARGS)

# All five run even if one fails, so that one call shows everything that needs fixing.
check: $(STAMP)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; failed=; \
	run() { echo "== $$*"; "$$@" || failed="$$failed, $$*"; }; \
	run ruff check .; \
	run ruff format --check .; \
	run mypy; \
	run lint-imports; \
	run codespell; \
	if [ -n "$$failed" ]; then echo "make check: failed: $${failed#, }"; exit 1; fi; \
	echo "make check: all passed"

# Without a network it checks .ci/known_bad.txt alone, and says so.
audit: $(STAMP)
	@$(PY) .ci/audit

# Not part of .ci/run, because it installs torch a second time.
wheel-test: $(STAMP)
	$(PY) .ci/wheel

# Not part of .ci/run, because its clone sets up its own environment (NEWCOMER_ARGS='--here --short' does not).
newcomer-test: $(STAMP)
	$(PY) .ci/newcomer $(NEWCOMER_ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "Open build/site/index.html."

# Uploads nothing. README is rendered as on a package page, where relative links do not work.
release: $(STAMP)
	rm -rf dist
	$(PY) -m build
	$(PY) -m twine check --strict dist/*
	@mkdir -p build
	$(PY) -m readme_renderer README.md --output build/README.html
	@echo "make release: upload dist/ with 'twine upload dist/*'; build/README.html shows how the page will look"

# A benchmark that needs root, iproute2 or more cores than this machine has says so, and the others run.
BENCHES := wire planner lion_step bandwidth lion_bandwidth overlap demo

bench: $(STAMP)
	@export OMP_NUM_THREADS=1; failed=; \
	for name in $(BENCHES); do \
	  echo "== python -m benchmarks.$$name"; $(PY) -m benchmarks.$$name || failed="$$failed $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "make bench: failed or could not run, see the reason above:$$failed"; exit 1; fi; \
	echo "make bench: all completed"

# Where there are two or four GPUs, NCCL too; where there is none, what a CPU can play (GPU_ARGS='--stages kernels').
# The page has all parts so far; a second call continues, and GPU_ARGS=--again starts over.
gpu-check: $(STAMP)
	$(PY) -m benchmarks.gpu_check $(GPU_ARGS)

# Errors and warnings are on stderr, so they are not filtered.
INSTALL := $(PY) -m pip install --disable-pip-version-check --no-compile -c constraints.txt
SHOW_PIP := PIP_VERBOSE=1 shows all that pip says.

# Count packages in the output of pip, whose own progress bars are per file and hidden in a pipe. There is no bar, because
# the total is known only when pip has resolved them. If pip changes its words, nothing is printed. A pipe ends with the
# exit code of its last command, so a line tells this one that pip failed. A loop, not awk: mawk waits until its buffer is
# full.
define show-progress
{ packages=0; failed=0; \
while IFS= read -r line; do \
  if [ -n "$$PIP_VERBOSE" ]; then printf '%s\n' "$$line"; fi; \
  case $$line in \
    "Collecting "*) \
      packages=$$((packages + 1)); \
      if [ $$((packages % 10)) -eq 0 ]; then echo "  $$packages packages collected"; fi ;; \
    "Installing collected packages"*) echo "  $$packages packages collected, installing them" ;; \
    "make: pip failed") failed=1 ;; \
  esac; \
done; \
exit $$failed; }
endef

# A stamp comes last, so that an interrupted set-up is resumed. What tests import is compiled here, even where Python is
# told to write no bytecode: tests start many processes, of which each would compile it again.
$(STAMP): pyproject.toml constraints.txt
	@$(make-venv)
	@echo "Installing the releases in constraints.txt into $(VENV): some minutes, once. $(SHOW_PIP)"
	@{ $(INSTALL) -e '.[recipes,dev,docs]' || echo "make: pip failed"; } | $(show-progress)
	@PYTHONDONTWRITEBYTECODE= $(PY) -c 'import torch, lightning.pytorch, transformers, ray.train.lightning, ray.train.torch'
	@touch $@

$(DEMO_STAMP): pyproject.toml constraints.txt
	@$(make-venv)
	@echo "Installing torch, Lightning and what else the demos need into $(VENV): a few minutes, once. $(SHOW_PIP)"
	@{ $(INSTALL) -e '.[demo,numba]' || echo "make: pip failed"; } | $(show-progress)
	@touch $@

# A .venv without pip was interrupted while it was created: venv completes it.
define make-venv
if ! $(PY) -m pip --version >/dev/null 2>&1; then \
  for python in $(PYTHONS); do \
    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then found=$$python; break; fi; \
  done; \
  if [ -z "$$found" ]; then \
    echo "Python >= 3.10 is needed, and none of '$(PYTHONS)' qualifies. Install it, or name yours: make PYTHONS=/path/to/python" >&2; \
    exit 1; \
  fi; \
  if ! $$found -c 'import ensurepip, venv' 2>/dev/null; then \
    echo "$$found has no venv module. On Debian or Ubuntu: sudo apt-get install python3-venv" >&2; \
    exit 1; \
  fi; \
  echo "Creating $(VENV) with $$($$found --version)."; \
  $$found -m venv $(VENV); \
fi
endef

# uv resolves for every supported Python at once, which pip cannot. It keeps pins that still fit, unless UPGRADE=1.
constraints:
	@$(make-venv)
	@mkdir -p build
	@$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target build/uv uv
	@echo "torch==$(TORCH)" > build/hold.txt
	@cp constraints.txt build/constraints.txt
	@build/uv/bin/uv pip compile pyproject.toml --quiet --universal --python-version 3.10 --all-extras \
	  --constraint build/hold.txt $(if $(UPGRADE),--upgrade) --no-annotate --no-header -o build/constraints.txt
	@{ echo "# Exact pins of everything that the set-up installs, for every supported Python and platform."; \
	  echo "# Made by 'make constraints'; do not edit. Used as: pip install -c constraints.txt -e '.[recipes,dev,docs]'"; \
	  cat build/constraints.txt; } > constraints.txt
	@git --no-pager diff --stat -- constraints.txt

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find lightning_commfree commfree_planner recipes benchmarks tests -type d -name __pycache__ -exec rm -rf {} +
