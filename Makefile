# SPDX-License-Identifier: Apache-2.0
# The one entry point for developers. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
PY := .venv/bin/python
FLEET := $(PY) -m tests.fleet
PYTEST := $(PY) -m pytest -q
COLLECTION := .build/collections/ansible_collections/tensorless/fleet
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export ANSIBLE_INJECT_FACT_VARS := false

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

.PHONY: setup
setup: .build/venv.stamp ## Install the pinned tools into .venv (asks for nothing else)

.build/venv.stamp: requirements/dev.txt pyproject.toml
	@mkdir -p .build/collections/ansible_collections/tensorless
	@ln -sfn ../../../.. $(COLLECTION)
	tools/bootstrap.sh
	@touch $@

# ---- what a newcomer runs --------------------------------------------------------------------------------------------
.PHONY: demo demo-down
demo: setup prerequisites ## Build a fleet, provision it twice, measure it, print the report, leave an endpoint
	$(FLEET) demo

demo-down: setup ## Remove the demo's fleet
	$(FLEET) down

.PHONY: test
test: ## Everything that must hold: lint, unit, sanity, packages, molecule and the fleet tests
	tools/timed.sh setup prerequisites-tests lint unit docs-check dist sanity importer wheel-tests \
	  fleet-tests

# ---- quick checks ----------------------------------------------------------------------------------------------------
.PHONY: lint
lint: setup ## ruff, mypy, yamllint, ansible-lint (production)
	ruff check .
	ruff format --check .
	mypy plugins/module_utils tensorless_fleet
	yamllint --strict .
	ANSIBLE_HOME=$(CURDIR)/.build/ansible-lint ansible-lint

.PHONY: unit
unit: setup ## Unit tests and the conformance cases
	$(PYTEST) -n 4 --dist worksteal -m "not soak and not fleet and not serial" tests/unit tests/conformance tests/pn
	$(PYTEST) -m "serial and not soak" tests/unit

.PHONY: docs docs-check
docs: setup ## Write the roles' README files from their argument specs
	$(PY) tools/role_readmes.py
	$(PY) -m tensorless_fleet._help > docs/reference/cli.md

docs-check: setup ## Documentation of modules and roles, and the changelog
	cd $(COLLECTION) && antsibull-docs lint-collection-docs --plugin-docs --validate-collection-refs self --skip-rstcheck .
	antsibull-changelog lint
	$(PY) tools/role_readmes.py --check

# ---- packages --------------------------------------------------------------------------------------------------------
.PHONY: dist
dist: setup ## Build the collection's tarball and the wheel into dist/
	rm -rf dist
	ansible-galaxy collection build --output-path dist
	$(PY) -m build -q --wheel --no-isolation --outdir dist

.PHONY: sanity
sanity: dist ## ansible-test sanity on the built collection
	tools/sanity.sh

.PHONY: importer
importer: dist ## galaxy-importer on the built tarball
	tools/importer.sh

.PHONY: wheel-tests
wheel-tests: dist ## Install, update and remove as the pages say, in new virtual environments
	$(PYTEST) tests/install

# ---- the test fleet --------------------------------------------------------------------------------------------------
.PHONY: prerequisites prerequisites-tests
prerequisites: ## Install the Debian packages that the fleet needs
	tools/prerequisites.sh

prerequisites-tests: ## The same, and what the tests need besides
	tools/prerequisites.sh tests

.PHONY: fleet-up fleet-down
fleet-up: setup prerequisites ## Start the bare fleet: hosts, registry, Hub, inventory in .build/fleet
	$(FLEET) up

fleet-down: demo-down ## Remove the fleet

.PHONY: molecule
molecule: setup prerequisites ## Both molecule scenarios, each with a fleet of its own
	molecule test --scenario-name default
	molecule test --scenario-name reset

# Tests that work on the three provisioned hosts, and tests that start hosts of their own beside them.
ON_THE_FLEET := tests/fleet/site tests/fleet/clients tests/fleet/cli tests/fleet/bench tests/fleet/server/test_rolling.py \
  tests/fleet/models tests/fleet/promotion
ON_OWN_HOSTS := tests/fleet/server --ignore=tests/fleet/server/test_rolling.py tests/fleet/driver

.PHONY: fleet-tests
fleet-tests: setup prerequisites dist ## molecule and all fleet tests on one fleet
	molecule destroy --scenario-name default
	molecule test --scenario-name default --destroy never
	tools/together.sh '$(PYTEST) $(ON_THE_FLEET) -m "fleet and not soak"' '$(PYTEST) $(ON_OWN_HOSTS) -m "fleet and not soak"'
	molecule test --scenario-name reset
	molecule destroy --scenario-name default

# ---- benches and long tests ------------------------------------------------------------------------------------------
.PHONY: bench-plan bench-facts bench-cli bench-download bench-fleet-api bench-witness bench-others soak mutants
bench-plan: setup ## Time of making a plan
	$(PY) tests/bench/plan_bench.py

bench-facts: setup ## Time of reading the cards' facts
	$(PY) -m tests.bench.facts_bench

bench-cli: setup ## Time of starting the command
	$(PY) tests/bench/cli_bench.py start

bench-download: setup ## Downloads against curl and aria2 on shaped links (root; needs nginx-light, aria2, openssl)
	$(PY) -m tests.bench.download

bench-witness: setup ## What the witness costs a real llama-server; wants a quiet machine, 6 min
	$(PY) -m tests.bench.witness

bench-others: setup ## llama-benchy, guidellm and AIPerf beside ours on one server (fetches 7 GB of packages)
	$(PY) -m tests.bench.others

bench-fleet-api: setup ## A fleet of 32 simulated hosts through the Python interface
	$(PY) tests/bench/cli_bench.py fleet

soak: setup prerequisites-tests bench-fleet-api ## The long tests; their last figures stand in docs/measurements.md
	$(FLEET) up
	TENSORLESS_SOAK=1 $(PYTEST) tests -m soak
	TENSORLESS_FUZZ=100000 $(PYTEST) tests/unit/gpu/test_fuzz.py
	TENSORLESS_EXAMPLES=3000 $(PYTEST) tests/unit/recipe/test_plan_properties.py

mutants: setup ## Change the product in small ways and see that a test notices
	$(PY) tests/mutants.py

# ---- the engine, not part of `make test` -----------------------------------------------------------------------------
.PHONY: engine-source engine-cpu
engine-source: setup ## The patched llama.cpp in .build/engine/source
	$(PY) -m engine.patches.apply --update --output .build/engine/source

engine-cpu: engine-source ## Build the patched server for the CPU; goes on where it was interrupted
	sh engine/build.sh cpu .build/engine/source .build/engine/cpu
