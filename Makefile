# SPDX-License-Identifier: Apache-2.0
# The one entry point for developers. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python
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
