# make demo   environment, fork, server, the main job and the RL loop, on any Linux x86-64 machine; JSON=PATH keeps the
#             figures, demo.png the picture
# make test   every test that runs without a GPU, by two workers, which begin with those that need servers
# make check  lint, and the tests that take less than half a second each, no browser: a minute on two cores
# make lint   format, lint, types, shell scripts, YAML
# make coverage  every test once more, and which share of tlt_server's lines they run, in all processes; JSON=PATH keeps it
# make bench  the CPU-sized version of each table of benchmarks/ in under twenty minutes, kept in BENCH; SMOKE=1: the least
#             that proves that they run, and so of hot reload and RL steps, in six minutes
# make lock   renews the locks of deploy/locks: what `make env` and the images install, with hashes; KEEP=1 only adds what
#             is missing
# make wheels    wheels of tlt-server, tlt-client and tlt-verl, in DIST
# make release VERSION=x.y.z  a commit that makes a version of what is unreleased, and its tag
#
# PYTHON       the interpreter that the environment is made from: 3.11 or 3.12
# VENV         where the environment lies
# TORCH_INDEX  a package index to take torch from, as https://download.pytorch.org/whl/cpu for CPU builds;
#              PyPI's torch is built for CUDA: it works on a CPU too, and is several GB larger

VENV ?= .venv
TORCH_INDEX ?=
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN = $(VENV)/bin
# Else each process that imports our modules compiles them anew.
export PYTHONDONTWRITEBYTECODE :=
READY = $(VENV)/.ready

.PHONY: demo test check lint coverage bench env lock wheels release clean

env: $(READY)

# torch first, alone: everything after it keeps the build that it finds, and is of the versions and hashes in the lock.
$(READY): pyproject.toml $(wildcard clients/*/pyproject.toml examples/*/pyproject.toml) $(wildcard patches/* deploy/locks/dev-*) deploy/locks/trainers.txt $(wildcard tlt_server/fork/*.py)
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found: name one, as in make PYTHON=/path/to/python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0 torchvision==0.28.0
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes \
	    -r deploy/locks/dev-$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r deploy/locks/trainers.txt
	$(BIN)/python -m pip install --quiet -e '.[cpu,trainer,demo,dev]' -e clients/tlt_client -e clients/tlt_verl -e examples/grpo
	$(BIN)/tlt-server fork install
	@touch $@

demo: $(READY)
	$(BIN)/tlt-server demo $(if $(JSON),--json $(JSON))

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --no-loadscope-reorder

check: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not server and not slow"

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck --severity=warning .ci/* benchmarks/gpu/*.sh deploy/slurm/*.sbatch
	$(BIN)/yamllint --strict --config-file deploy/.yamllint deploy .pre-commit-config.yaml

coverage: $(READY)
	$(BIN)/python -m tests.line_coverage $(if $(JSON),--json $(JSON))

BENCH ?= bench
bench: $(READY)
	for table in speedup accept_length context; do \
	    $(BIN)/python -m benchmarks $$table --models $(BENCH)/models/50m --json $(BENCH)/$$table.json \
	        $(if $(SMOKE),--smoke) || exit; \
	done
	$(if $(SMOKE),$(BIN)/python -m benchmarks swap --smoke --json $(BENCH)/swap.json)
	$(if $(SMOKE),$(BIN)/python -m benchmarks one_sample --smoke --json $(BENCH)/one_sample.json)
	$(if $(SMOKE),$(BIN)/python -m benchmarks publications --smoke --json $(BENCH)/publications.json)
	$(if $(SMOKE),$(BIN)/python -m benchmarks step --smoke --json $(BENCH)/step.json)

# The fork is asked what it needs; uv, which resolves, is not part of the environment.
lock: $(READY)
	$(PYTHON) -m venv $(VENV)/lock && $(VENV)/lock/bin/pip install --quiet uv
	PATH=$(abspath $(VENV))/lock/bin:$$PATH $(BIN)/python deploy/lock.py $(if $(KEEP),--keep)

DIST ?= dist
wheels: $(READY)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(DIST) . ./clients/tlt_client ./clients/tlt_verl

release: $(READY)
	$(BIN)/python deploy/release.py $(VERSION)

clean:
	rm -rf $(VENV)
