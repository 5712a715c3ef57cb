# Everything that is done here more than once. CI calls these targets and nothing else.
#
# An environment is remade from its lock (requirements/*.txt) when the lock changes; the stamp files inside it say
# what it holds. Two environments, because the main job must not need torch:
#   .venv-run   NumPy, rich and a release wheel of mlaplan, as a user installs it
#   .venv       all that tests, lints and benchmarks need, with an editable mlaplan
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
JOBS ?= $(shell nproc)
RUN_ARGS ?=
PYTEST_ARGS ?=

# A uv of the user's own serves; where there is none, a pinned one gets an environment to itself.
# Asked for its version, because a shim may stand on PATH for a uv that is not there.
UV := $(or $(shell uv --version >/dev/null 2>&1 && command -v uv),$(CURDIR)/.venv-uv/bin/uv)
export UV_PYTHON_DOWNLOADS := never
# Tests and the main job make many small products; on a few shared cores a thread pool for each costs ten times more.
export OPENBLAS_NUM_THREADS := 1
BIN := .venv/bin
# maturin looks for the environment in VIRTUAL_ENV and for uv on PATH.
DEVELOP := VIRTUAL_ENV=$(CURDIR)/.venv PATH=$(dir $(UV)):$$PATH $(BIN)/maturin develop --uv
RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find src -name '*.rs')
PYTHON_SOURCES := README.md LICENSE $(shell find python -name '*.py' -o -name '*.pyi')

# vLLM releases that the adapter is run against. 0.33 has no package for CPUs: its Python files run from the main one.
VLLM_RELEASES ?= 0.30.0 0.31.0 0.32.0 0.33.0
VLLM_STEPS ?= 5000
VLLM_PYTHON ?= $(PYTHON)

# Release code with the checks of a debug build: an overflow or a broken debug_assert fails a test, and the
# hundred thousand steps of the stateful tests still pass in seconds.
CI_PROFILE := --profile ci --locked
# Seconds per fuzzer, and the toolchain that has libFuzzer's instrumentation.
FUZZ_SECONDS ?= 60
NIGHTLY ?= nightly
# Real logs, and steps of each: half an hour on one core.
SOAK_LOGS ?= $(wildcard ../shared/data/*.csv)
SOAK_STEPS ?= 1000000
# A checkout of RustSec's advisory-db for machines that cannot fetch it.
ADVISORY_DB ?=
# Where cargo-deny looks for it: the name holds a hash of the address that it would fetch from.
DENY_DB := target/advisory-dbs

# What this leaves out needs hardware or programs that a fresh machine lacks, or minutes. What is marked `interpret`
# needs a process in which Triton interprets; tests/kernels/test_interpreter.py makes one and runs them all.
FRESH := not (amd or gpu or interpret or slow or vllm)

.PRECIOUS: .venv-vllm-%/.lock .venv-vllm-%/.mlaplan
.PHONY: help run test test-rust test-python test-gpu sanitize-gpu test-amd test-vllm lint lint-rust lint-python fmt fuzz fuzz-python soak bench bench-smoke model-balanced wheel package \
	audit audit-crates docs docs-links lock clean ci

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 14

run: .venv-run/.mlaplan ## the main job: plan and decode the built-in log (RUN_ARGS='LOG --steps 2000')
	.venv-run/bin/mlaplan run $(RUN_ARGS)

test: test-rust test-python ## all tests that need no GPU

test-rust: ## unit, property and doc tests of the crate
	cargo test $(CI_PROFILE)

test-python: .venv/.mlaplan ## pytest against the extension (PYTEST_ARGS='-k schedule')
	$(BIN)/pytest -n $(JOBS) --dist worksteal --durations 10 -m "$(FRESH)" $(PYTEST_ARGS)

test-gpu: .venv/.mlaplan ## tests that need a CUDA or ROCm device
	$(BIN)/pytest -m gpu tests/gpu tests/kernels $(PYTEST_ARGS)

sanitize-gpu: .venv/.mlaplan ## kernels under compute-sanitizer, and between guard bands, on a CUDA device
	$(BIN)/python benches/gpu/check_sanitizer.py
	$(BIN)/python benches/gpu/check_bounds.py

test-amd: .venv/.mlaplan ## our kernels and aiter's as gfx942 and gfx950 code, emulated (TINYGRAD=.. AITER_HSA=..)
	$(BIN)/pytest -m amd tests/amd $(PYTEST_ARGS)

test-vllm: $(VLLM_RELEASES:%=test-vllm-%) ## the adapter beside vLLM's builder (VLLM_RELEASES=0.32.0 VLLM_STEPS=300)

test-vllm-%: .venv-vllm-%/.mlaplan
	MLAPLAN_VLLM_STEPS=$(VLLM_STEPS) .venv-vllm-$*/bin/pytest tests/vllm $(PYTEST_ARGS)

lint: lint-rust lint-python ## formatting, lints, types, stubs and docs; changes nothing

lint-rust:
	cargo fmt --check
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	cargo clippy --all-targets --locked -- -D warnings
	cargo clippy --all-targets --locked --features python -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --locked --features python

lint-python: .venv/.mlaplan
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/mypy tests/kernels
	$(BIN)/mypy tests/packaging
	$(BIN)/python -m mypy.stubtest mlaplan._core

docs: .venv/.mlaplan ## the documentation site, every warning an error; docs/_build/html/index.html
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	@echo "built docs/_build/html/index.html"

docs-links: .venv/.mlaplan ## follow the site's links to other sites; needs a network
	$(BIN)/sphinx-build -q -b linkcheck docs docs/_build/links

fmt: .venv/.lock ## format everything and apply the safe fixes
	cargo fmt
	cargo fmt --manifest-path fuzz/Cargo.toml
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

fuzz: ## run each fuzzer of fuzz/ from its seeds (FUZZ_SECONDS=3600); needs the nightly toolchain and cargo-fuzz
	@cargo +$(NIGHTLY) fuzz --version || \
		{ echo "needed: rustup toolchain install $(NIGHTLY); cargo install cargo-fuzz --locked" >&2; exit 1; }
	for target in batch schedule step; do \
		mkdir -p fuzz/corpus/$$target; \
		cargo +$(NIGHTLY) fuzz run $$target fuzz/corpus/$$target fuzz/seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -max_len=1024 -verbosity=0 -print_final_stats=1; \
	done

fuzz-python: .venv/.mlaplan ## the public API under histories that hypothesis makes up (FUZZ_SECONDS=3600)
	$(BIN)/python tests/python/fuzzing.py --seconds $(FUZZ_SECONDS)

soak: .venv/.lock ## ten million steps in the core, then SOAK_STEPS of each log in SOAK_LOGS; writes docs/results
	rm -f .venv/.mlaplan # the extension is about to be another one than the tests want
	$(DEVELOP) --release --locked
	mkdir -p target
	cargo test --release --locked --test soak -- --ignored --nocapture | tee target/soak.txt
	grep '^|' target/soak.txt > target/soak.md
	$(BIN)/python tests/python/soaking.py $(SOAK_LOGS) --steps $(SOAK_STEPS) --core target/soak.md --out docs/results

bench: .venv/.lock ## Criterion and pytest-benchmark, on a release build
	cargo bench --locked
	rm -f .venv/.mlaplan # the extension is about to be another one than the tests want
	$(DEVELOP) --release --locked
	$(BIN)/pytest --benchmark-enable --benchmark-only benches/python

# One script per question; the machine with the GPU brings its own Python with torch, Triton and mlaplan.
GPU_PYTHON ?= python3
GPU_ARGS ?=
GPU_QUESTIONS := $(patsubst benches/gpu/%.py,%,$(wildcard benches/gpu/check_*.py benches/gpu/time_*.py))

.PHONY: $(GPU_QUESTIONS)
$(GPU_QUESTIONS): # make time_decode GPU_ARGS='--peer flashmla.py': ask it, and write its dated file
	$(GPU_PYTHON) benches/gpu/$@.py --out docs/results $(GPU_ARGS)

bench-smoke: .venv/.mlaplan ## run each benchmark once, untimed
	cargo test --benches $(CI_PROFILE)
	$(BIN)/pytest benches/python

model-balanced: ## the balanced schedule against aiter's and the bound, by the kernels' cost tables
	cargo run --quiet --release --locked --example balance > docs/results/2026-11-30-balanced-model.md

wheel: .venv/.lock ## release wheel (abi3, CPython 3.10 and later) and sdist into dist/
	rm -rf dist
	$(BIN)/maturin build --release --out dist
	$(BIN)/maturin sdist --out dist

package: .venv/.lock .venv-audit/.lock ## make wheel and sdist, check what is in them, install each in empty environments
	rm -rf target/package
	$(BIN)/maturin sdist --out target/package
	$(BIN)/maturin build --release --out target/package
	MLAPLAN_UV=$(UV) MLAPLAN_AUDITWHEEL=.venv-audit/bin/auditwheel $(BIN)/pytest tests/packaging $(PYTEST_ARGS)

audit-crates: ## licences, bans and sources of the crates
	@cargo deny --version || { echo "needed: cargo install cargo-deny --locked" >&2; exit 1; }
	cargo deny --locked check licenses bans sources

audit: audit-crates .venv-audit/.lock ## the same, and advisories, whose databases must be reachable
	@if [[ -n "$(ADVISORY_DB)" ]]; then \
		mkdir -p $(DENY_DB) && rm -rf $(DENY_DB)/* && git clone --quiet "$(ADVISORY_DB)" $(DENY_DB)/advisory-db-3157b0e258782691; \
		sed 's#^\[advisories\]#&\ndb-path = "$(CURDIR)/$(DENY_DB)"#' deny.toml > target/deny.toml; \
		echo "advisories of $$(git -C $(DENY_DB)/advisory-db-3157b0e258782691 log -1 --format=%cs)"; \
		for manifest in Cargo.toml fuzz/Cargo.toml; do \
			cargo deny --locked --offline --manifest-path $$manifest --config target/deny.toml check advisories; \
		done; \
	elif cargo deny fetch db 2>/dev/null; then cargo deny --locked check advisories; \
	else echo "RustSec's database cannot be reached: advisories of the crates were not checked"; fi
	@.venv-audit/bin/pip-audit --disable-pip --require-hashes -r requirements/run.txt -r requirements/dev.txt \
		> target/pip-audit.txt 2>&1 || { cat target/pip-audit.txt; exit 1; }
	@skipped=$$(grep -c 'could not be audited' target/pip-audit.txt || true); \
	if [[ $$skipped -gt 0 ]]; then echo "PyPI's advisories cannot be reached: $$skipped packages were not checked"; \
	else cat target/pip-audit.txt; fi

lock: ## resolve requirements/*.in anew
	for name in uv run dev audit; do \
		$(UV) pip compile --quiet --upgrade --universal --python-version 3.10 --generate-hashes --no-emit-index-url \
			--custom-compile-command "make lock" requirements/$$name.in --output-file requirements/$$name.txt; \
	done
	$(UV) pip compile --quiet --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
		--no-emit-index-url --custom-compile-command "make lock" requirements/vllm.in --output-file requirements/vllm.txt

clean: ## remove build outputs and environments
	rm -rf target fuzz/target dist docs/_build docs/_generated .venv .venv-audit .venv-run .venv-uv .venv-vllm-* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find python -name '*.so' -delete

ci: ## what CI runs
	bash .ci/run

$(CURDIR)/.venv-uv/bin/uv: requirements/uv.txt
	$(PYTHON) -m venv --clear .venv-uv
	.venv-uv/bin/python -m pip install --quiet --require-hashes -r requirements/uv.txt
	touch $@

.venv-run/.lock: requirements/run.txt $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv-run
	$(UV) pip sync --quiet --python .venv-run/bin/python --require-hashes requirements/run.txt
	touch $@

.venv-run/.mlaplan: .venv-run/.lock $(RUST_SOURCES) $(PYTHON_SOURCES)
	rm -rf target/run-wheel
	.venv-run/bin/maturin build --release --out target/run-wheel
	$(UV) pip install --quiet --python .venv-run/bin/python --no-deps --reinstall target/run-wheel/*.whl
	touch $@

.venv/.lock: requirements/dev.txt $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv
	$(UV) pip sync --quiet --python .venv/bin/python --require-hashes requirements/dev.txt
	touch $@

.venv-audit/.lock: requirements/audit.txt $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv-audit
	$(UV) pip sync --quiet --python .venv-audit/bin/python --require-hashes requirements/audit.txt
	touch $@

.venv-vllm-%/.lock: requirements/vllm.txt requirements/vllm-%.txt $(UV)
	$(UV) venv --quiet --allow-existing --python $(VLLM_PYTHON) .venv-vllm-$*
	$(UV) pip sync --quiet --python .venv-vllm-$*/bin/python --require-hashes \
		requirements/vllm.txt requirements/vllm-$*.txt
	touch $@

.venv-vllm-%/.mlaplan: .venv-vllm-%/.lock .venv-run/.mlaplan
	$(UV) pip install --quiet --python .venv-vllm-$*/bin/python --no-deps --reinstall target/run-wheel/*.whl
	touch $@

.venv/.mlaplan: .venv/.lock $(RUST_SOURCES)
	$(DEVELOP) $(CI_PROFILE)
	touch $@
