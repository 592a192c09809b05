# `make` lists the targets. Each target installs its own requirements.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# The parts of `test` share cargo's lock, so they run one after the other.
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

CACHE_DIR := $(or $(EMERGENT_CACHE_DIR),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/emergent)

# On a build server every run has a new clone. The target directory outside of it is shared.
ifeq ($(CI),true)
export CARGO_TARGET_DIR ?= $(CACHE_DIR)/target
export CARGO_INCREMENTAL ?= 0
# A test that was compiled in an earlier clone must find its snapshots in this one.
export INSTA_WORKSPACE_ROOT := $(CURDIR)
endif
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)

# ARGS are arguments of the program: make run ARGS='--listen 127.0.0.1:8080'
ARGS ?=

SHELL_SCRIPTS := scripts/setup scripts/demo scripts/phase scripts/runsc-wrapper .ci/run \
                 images/workspace/build images/workspace/clean-rootfs images/mcp-node/build images/mcp-python/build

##@ Use it
.PHONY: run demo doctor
run: setup build ## Start the server on this machine (ARGS='--listen 127.0.0.1:8080')
	@exec $(TARGET_DIR)/release/emergent serve $(ARGS)

demo: setup build ## Create a workspace, use the tools, destroy it; print the durations
	@EMERGENT_BIN=$(TARGET_DIR)/release/emergent scripts/demo

doctor: build ## Check this machine and print the fix of each problem
	@$(TARGET_DIR)/release/emergent doctor $(ARGS)

##@ Change it
.PHONY: test fmt lint doc deny unit conformance
test: setup-test fmt lint doc deny unit ## All checks that a change must pass

fmt: ## … the format (cargo fmt repairs it)
	@scripts/phase fmt cargo fmt --all --check

lint: ## … clippy, and shellcheck where it is installed
	@scripts/phase clippy cargo clippy --workspace --all-targets --locked -- -D warnings
	@! command -v shellcheck >/dev/null || scripts/phase shellcheck shellcheck -x -P SCRIPTDIR $(SHELL_SCRIPTS)

doc: ## … the build of the documentation
	@RUSTDOCFLAGS='-D warnings' scripts/phase doc cargo doc --workspace --no-deps --locked --quiet

deny: ## … licences, bans and sources of the dependencies, and unused ones
	@scripts/phase deny cargo deny --workspace --log-level error check bans licenses sources
	@scripts/phase machete cargo machete --skip-target-dir

unit: ## … the tests (ARGS='-E test(edit)' selects some)
	@scripts/phase nextest cargo nextest run --workspace --locked $(ARGS)
	@scripts/phase doctest cargo test --workspace --doc --locked --quiet

conformance: setup-test ## Only the official MCP conformance suites (`unit` runs them too)
	@cargo nextest run --locked -p emergent --test mcp_conformance $(ARGS)

##@ Measure it
.PHONY: bench load crashes neighbours
bench: setup build ## Measure the promises of SPECIFICATION.md as ratios on this machine
	@cargo run --release --locked -p xtask -- bench $(ARGS)

load: setup build ## 50 concurrent workspaces from create to destroy; print leftovers (ARGS='--help')
	@cargo run --release --locked -p xtask -- load $(ARGS)

crashes: setup build ## Crash an MCP server 1,000 times; print the times until it is back, and leftovers
	@cargo run --release --locked -p xtask -- crashes $(ARGS)

neighbours: setup build ## Print the slowdown of a workspace beside a fork bomb, a memory hog and a disk filler
	@cargo run --release --locked -p xtask -- neighbours $(ARGS)

##@ Make parts of it
.PHONY: setup setup-test build openapi clean help
setup: ## Install and start the requirements of `run` (Docker engine, gVisor, image)
	@scripts/setup run

setup-test:
	@scripts/phase setup scripts/setup test

build: ## Build the release binary
	@cargo build --release --locked -p emergent

openapi: ## Write openapi/*.json from the handlers
	@cargo run --locked -p xtask -- openapi $(ARGS)

clean: ## Remove the compiled files; images and tools stay
	@cargo clean

help: ## List the targets
	@printf 'emergent: isolated machines for AI agents\n\n'
	@printf '  First steps:     make run      then the printed commands in a second terminal\n'
	@printf '  All tools:       make demo\n'
	@printf '  Before a commit: make test\n'
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	    /^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
