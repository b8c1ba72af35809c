# Every target works alone after a fresh clone on Debian or Ubuntu with python3 (3.11 or later), git and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test check compile bench chaos bench-accuracy fuzz golden format requirements image audit dist archive clean

PYTHON ?= python3
# Tools that are missing on the system are unpacked here; see scripts/setup_tools.sh.
export PATH := $(CURDIR)/.tools/bin:$(PATH)
RUN := .venv/bin/python
# Simulated scenario of `make demo`.
SCENARIO ?= demo
# Files or tests to run: make test TESTS=tests/test_rules.py
TESTS ?= tests
# Number of parallel test processes, which wait half of their time. 0 runs the tests in one process, for a debugger.
JOBS ?= $(shell echo $$(($$(nproc) + 3)))
# Prometheus, promtool and vmalert run for seconds here: less frequent garbage collection saves a seventh of their time.
test: export GOGC ?= 400
# Some containers set this variable: each of the hundreds of programs that tests start would then compile all its modules.
test check: export PYTHONDONTWRITEBYTECODE :=
# pip shows its downloads on a terminal only.
PIP := $(RUN) -m pip --disable-pip-version-check $(shell test -t 2 || echo --quiet)

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: .venv/.runtime .venv/.develop .tools/.demo .tools/.deploy .tools/.test ## Install .venv and the tools of demo and tests
	@echo "installed: .venv/bin/gpu-cost-exporter"

.venv/bin/python:
	./scripts/setup_tools.sh venv "$(PYTHON)"

# Continuous integration imports few of the two thousand modules of the Kubernetes client: Python compiles those that it imports.
.venv/.runtime: requirements/build.txt requirements/runtime.txt pyproject.toml | .venv/bin/python
	$(PIP) install $(if $(CI),--no-compile) --require-hashes -r requirements/build.txt -r requirements/runtime.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

.venv/.develop: requirements/dev.txt .venv/.runtime
	$(PIP) install --require-hashes -r requirements/dev.txt
	@touch $@

# The script creates these files when no tool is missing; otherwise make runs it again next time. Targets that use apt run in
# sequence, also with make --jobs, because apt has one lock.
.tools/.demo: scripts/setup_tools.sh | .venv/bin/python
	@./scripts/setup_tools.sh demo

.tools/.deploy: scripts/setup_tools.sh scripts/schemas.py .venv/.develop
	@./scripts/setup_tools.sh deploy

.tools/.test: scripts/setup_tools.sh | .tools/.demo
	@./scripts/setup_tools.sh test

demo: .venv/.runtime .tools/.demo ## Run a simulated node with Prometheus, Alertmanager and the cost service; Ctrl-C stops all of them
	@exec $(RUN) -m exporter simulate stack $(SCENARIO)

test: .venv/.develop .tools/.demo .tools/.deploy .tools/.test ## Run the tests; STRICT=1 fails skipped tests except those for a real GPU, COVERAGE=1 measures branches
	@directory=$$(mktemp -d /tmp/tests.XXXXXX); \
	$(RUN) -m pytest -p tests.strict_plugin -n $(JOBS) --dist loadfile --no-loadscope-reorder --basetemp="$$directory/t" \
		$(if $(CI),--durations=30) \
		$(if $(COVERAGE),--cov --cov-report=term --cov-report=xml:.cache/coverage.xml) $(TESTS); \
	rm -rf "$$directory"

# Compiles the tests once; otherwise each test process compiles all tests.
compile: .venv/.develop
	@env -u PYTHONDONTWRITEBYTECODE $(RUN) -m pytest --collect-only --quiet tests >/dev/null 2>&1 || true

check: .venv/.develop .tools/.demo .tools/.deploy ## Check lint, types, layers, rules, image, chart and generated files
	$(RUN) scripts/pins.py
	$(RUN) scripts/audit.py
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(RUN) scripts/check_repository.py
	$(RUN) dashboards/build.py --check
	$(RUN) scripts/rules.py --check
	$(RUN) scripts/openapi_doc.py --check
	$(RUN) scripts/architecture_doc.py --check
	promtool check rules rules/*.yaml
	.venv/bin/hadolint Dockerfile
	$(RUN) scripts/chart.py --check
	helm lint --strict --quiet deploy/helm/gpu-cost-exporter

bench: .venv/.develop .tools/.test ## Compare measurements with every budget in 5 minutes; never fails on a slow machine
	$(RUN) benchmarks/bench.py

# make chaos SEEDS=17 repeats one seed; SEEDS=1..200 takes an hour of one core. Each schedule starts FAULTS within WITHIN seconds.
SEEDS ?= 1..20
FAULTS ?= 54
WITHIN ?= 12
chaos: JOBS = 1
chaos: .venv/.develop ## Run agents under random faults and compare every page with the truth; see docs/reliability.md
	$(RUN) benchmarks/chaos.py --seeds $(SEEDS) --faults $(FAULTS) --seconds $(WITHIN) --jobs $(JOBS) $(CHAOS_OPTIONS)

bench-accuracy: .venv/.develop .tools/.test ## Compare a day of a real trace through meters, ledger and Prometheus with the truth; 20 times, an hour
	$(RUN) benchmarks/accuracy.py --seeds 20

# Families, or family/target, separated by commas; empty: all.
FAMILY ?=
SECONDS ?= 120

.cache/fuzz/site/atheris: | .venv/.develop
	@$(PIP) install --no-deps --only-binary :all: --target .cache/fuzz/site atheris==3.0.0

fuzz: .venv/.develop .cache/fuzz/site/atheris ## Fuzz the parsers in which fuzzing found faults (FAMILY=yaml,wire; SECONDS=120 for each)
	$(RUN) benchmarks/fuzz.py --family "$(FAMILY)" --seconds $(SECONDS)

golden: .venv/.develop ## Write golden files and generated files from the current program; review the difference
	UPDATE_GOLDEN=1 $(RUN) -m pytest -q -k "golden" $(TESTS)
	$(RUN) scripts/metrics_doc.py
	$(RUN) scripts/configuration_doc.py
	$(RUN) scripts/openapi_doc.py
	$(RUN) scripts/architecture_doc.py
	$(RUN) dashboards/build.py
	$(RUN) scripts/rules.py
	$(RUN) scripts/chart.py
	git diff --stat

format: .venv/.develop ## Format the code and apply the fixes of ruff
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# Constraints cannot have extras. dev.txt is not used as constraints and keeps them: otherwise pip 23 finds no pin for an extra
# (coverage[toml]) that a pinned package requires, if the index has a newer version than the pin.
COMPILE := .venv/bin/pip-compile --quiet --generate-hashes --allow-unsafe --no-header --no-annotate \
	--no-emit-index-url --no-emit-trusted-host --no-emit-find-links

requirements: .venv/.develop ## Pin the requirements again (UPGRADE=--upgrade selects newer versions)
	$(COMPILE) --strip-extras $(UPGRADE) --output-file requirements/build.txt requirements/build.in
	$(COMPILE) --strip-extras $(UPGRADE) --output-file requirements/runtime.txt pyproject.toml
	$(COMPILE) --no-strip-extras $(UPGRADE) --output-file requirements/dev.txt requirements/dev.in

# make image BUILDER=docker IMAGE=registry.example.org/gpu-cost-exporter BASE_IMAGE=registry.example.org/python:3.13-slim-bookworm
BUILDER ?= $(firstword $(foreach program,docker podman buildah,$(if $(shell command -v $(program)),$(program))))
IMAGE ?= gpu-cost-exporter
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' exporter/__init__.py)
LABELS = --build-arg VERSION=$(VERSION) --build-arg REVISION=$(shell git rev-parse HEAD)
BASE = $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE))
# Their default format (OCI) has no health checks.
FORMAT = $(if $(filter podman buildah,$(notdir $(firstword $(BUILDER)))),--format docker)
# More options of the builder, such as a folder of wheels: docs/install.md, "Air-gapped".
BUILD_OPTIONS ?=

# RELEASE=1: a tag can move, so a release pins its base image by digest, like the Dockerfile.
image: ## Build the images of the agent and of the cost service (RELEASE=1: BASE_IMAGE needs a digest)
	@test -z "$(RELEASE)" || test -z "$(BASE_IMAGE)" || echo "$(BASE_IMAGE)" | grep -Eq '@sha256:[0-9a-f]{64}$$' || { \
	  echo "BASE_IMAGE: '$(BASE_IMAGE)' has no digest; expected: an image such as python:3.13-slim-bookworm@sha256:...; see docs/release.md" >&2; exit 1; }
	$(BUILDER) build $(FORMAT) $(LABELS) $(BASE) $(BUILD_OPTIONS) --target agent --tag $(IMAGE):$(VERSION) .
	$(BUILDER) build $(FORMAT) $(LABELS) $(BASE) $(BUILD_OPTIONS) --target service --tag $(IMAGE)-service:$(VERSION) .

audit: .venv/.develop ## Check the pinned versions for known vulnerabilities and withdrawn releases; fails if no service responds
	$(RUN) scripts/pins.py
	$(RUN) scripts/audit.py --required

dist: .venv/.develop ## Build sdist, wheel and bill of materials of the last commit in dist/, twice, and compare them
	$(RUN) scripts/release.py

# make archive PYTHONS="3.11 3.12 3.13": the archive supports all of these.
PYTHONS ?= $(shell $(RUN) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
archive: .venv/.develop ## Pack the agent with its libraries for hosts without pip, for this architecture (PYTHONS="3.11 3.12 3.13")
	./scripts/archive.sh $(PYTHONS)

clean: ## Remove all files created by make
	rm -rf .venv .tools .cache dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*
