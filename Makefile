# `make` alone says what there is. Everything installs what it needs by itself and says nothing when
# there is nothing to do.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# The parts of `test` share cargo's lock: one after the other.
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

CACHE_DIR := $(or $(EMERGENT_CACHE_DIR),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/emergent)

# On a build server every run is a new clone: keep what was compiled outside of it.
ifeq ($(CI),true)
export CARGO_TARGET_DIR ?= $(CACHE_DIR)/target
export CARGO_INCREMENTAL ?= 0
# What was compiled in an earlier clone must find its snapshots in this one.
export INSTA_WORKSPACE_ROOT := $(CURDIR)
endif
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)

# ARGS goes to the program: make run ARGS='--listen 127.0.0.1:8080'
ARGS ?=

SHELL_SCRIPTS := scripts/setup scripts/demo scripts/phase scripts/runsc-wrapper .ci/run \
                 images/workspace/build images/workspace/clean-rootfs images/mcp-node/build images/mcp-python/build

##@ Use it
.PHONY: run demo doctor
run: setup build ## Start the server on this machine (ARGS='--listen 127.0.0.1:8080')
	@exec $(TARGET_DIR)/release/emergent serve $(ARGS)

demo: setup build ## Create a workspace, use every tool, destroy it, with timings
	@EMERGENT_BIN=$(TARGET_DIR)/release/emergent scripts/demo

doctor: build ## Say what works on this machine and how to fix what does not
	@$(TARGET_DIR)/release/emergent doctor $(ARGS)

##@ Change it
.PHONY: test fmt lint doc deny unit conformance
test: setup-test fmt lint doc deny unit ## Everything a change must pass

fmt: ## … is it formatted? (cargo fmt repairs it)
	@scripts/phase fmt cargo fmt --all --check

lint: ## … clippy, and shellcheck where it is installed
	@scripts/phase clippy cargo clippy --workspace --all-targets --locked -- -D warnings
	@! command -v shellcheck >/dev/null || scripts/phase shellcheck shellcheck -x -P SCRIPTDIR $(SHELL_SCRIPTS)

doc: ## … does the documentation build?
	@RUSTDOCFLAGS='-D warnings' scripts/phase doc cargo doc --workspace --no-deps --locked --quiet

deny: ## … licences, bans, sources of the dependencies; is each of them used?
	@scripts/phase deny cargo deny --workspace --log-level error check bans licenses sources
	@scripts/phase machete cargo machete --skip-target-dir

unit: ## … the tests (ARGS='-E test(edit)' for some of them)
	@scripts/phase nextest cargo nextest run --workspace --locked $(ARGS)
	@scripts/phase doctest cargo test --workspace --doc --locked --quiet

conformance: setup-test ## The official MCP conformance suites alone (`unit` runs them too)
	@cargo nextest run --locked -p emergent --test mcp_conformance $(ARGS)

##@ Measure it
.PHONY: bench load crashes neighbours
bench: setup build ## The promises of SPECIFICATION.md as ratios, measured here and now
	@cargo run --release --locked -p xtask -- bench $(ARGS)

load: setup build ## 50 workspaces at once, from create to destroy; says what is left (ARGS='--help')
	@cargo run --release --locked -p xtask -- load $(ARGS)

crashes: setup build ## An MCP server that crashes 1,000 times; says how soon it is back and what is left
	@cargo run --release --locked -p xtask -- crashes $(ARGS)

neighbours: setup build ## A fork bomb, a memory hog and a disk filler beside a workspace in use; says how slow it gets
	@cargo run --release --locked -p xtask -- neighbours $(ARGS)

##@ Make parts of it
.PHONY: setup setup-test build openapi clean help
setup: ## Install and start what `run` needs (Docker engine, gVisor, image)
	@scripts/setup run

setup-test:
	@scripts/phase setup scripts/setup test

build: ## The release binary
	@cargo build --release --locked -p emergent

openapi: ## Write openapi/*.json anew from the handlers
	@cargo run --locked -p xtask -- openapi $(ARGS)

clean: ## Remove what was compiled (images and tools stay)
	@cargo clean

help: ## This list
	@printf 'emergent: isolated machines for AI agents\n\n'
	@printf '  A first look:   make run      and, in a second terminal, what it prints\n'
	@printf '  The whole tour: make demo\n'
	@printf '  Before a commit: make test\n'
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	    /^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
