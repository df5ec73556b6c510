# `make demo` and `make test` are all that a visitor needs; `make help` lists the rest.

CARGO ?= cargo
# One profile for everything, so that nothing is compiled twice.
PROFILE ?= release

HIP_SOURCES = $$(find hip include capi benches -name '*.h' -o -name '*.hip' -o -name '*.cpp' -o -name '*.c')

DROPIN = target/dropin
ENGINE = target/engine
# `make bench BENCH='--set S1 --json'` passes options.
BENCH_OUT = target/bench

# What `make bench-peers` needs on a machine without a network.
CARRIED = .whl
PIECES = flashinfer flashqla fla

RUSTC ?= rustc
PREFIX ?= /usr/local
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' Cargo.toml | head -n 1)
# What is built ahead: `make wheel code-objects PACKED_ARCHS=gfx942`.
PACKED_ARCHS = gfx942,sm_90a
CODE_OBJECTS = target/code-objects
COMMA = ,

.PHONY: help demo test test-engine dropin dropin-cuda conformance calibrate ahead code-objects wheel test-wheel test-wheel-quick install gpu gpu-bundle bench bench-peers bench-compare integrations peers-library peers-wheels sanitize lint check-docs release-check fmt doc setup clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: ## run a Gated DeltaNet prefill of Qwen3.5-35B-A3B and check it against the oracle
	@scripts/setup build
	$(CARGO) run --profile $(PROFILE) -p deltawave-cli -- prefill --model qwen3.5-35b-a3b \
		--seqlens 1,63,64,65,129,300,500,926 --dtype bf16 --check

test: ## run every test that this machine can run
	@scripts/setup test
	$(CARGO) test --workspace --profile $(PROFILE)
	@$(MAKE) --no-print-directory test-engine

# What an engine links. No kernels: its tests run none. Without cargo's test, which would compile what other tests need.
test-engine:
	@! $(CARGO) tree -p deltawave --no-default-features -e normal --prefix none | \
		grep -E '^(deltawave-sim|deltawave-lab|rayon|safetensors|libm|clap) '
	DELTAWAVE_ARCHS= DELTAWAVE_REQUIRE_KERNELS=0 $(CARGO) build -p deltawave --no-default-features \
		--profile $(PROFILE) --target-dir $(ENGINE)
	$(RUSTC) --edition 2024 --test tests/without_simulator.rs -o $(ENGINE)/without_simulator \
		--extern deltawave=$(ENGINE)/$(PROFILE:dev=debug)/libdeltawave.rlib \
		-L dependency=$(ENGINE)/$(PROFILE:dev=debug)/deps
	$(ENGINE)/without_simulator

dropin: ## build the simulator as libamdhip64.so, .so.5, .so.6 and .so.7 in target/dropin
	$(CARGO) build --profile $(PROFILE) -p deltawave-sim-dropin
	@mkdir -p $(DROPIN)
	@cp -f target/$(PROFILE)/libhip_on_simulator.so $(DROPIN)/libamdhip64.so
	@for v in 5 6 7; do ln -sf libamdhip64.so $(DROPIN)/libamdhip64.so.$$v; done
	@echo "LD_LIBRARY_PATH=$$PWD/$(DROPIN) runs a HIP program on the simulator"

dropin-cuda: ## build the CUDA driver under HIP's names as libamdhip64.so in target/dropin-cuda
	$(CARGO) build --profile $(PROFILE) -p deltawave-hip-cuda-dropin
	@mkdir -p $(DROPIN)-cuda
	@cp -f target/$(PROFILE)/libhip_on_cuda.so $(DROPIN)-cuda/libamdhip64.so
	@for v in 5 6 7; do ln -sf libamdhip64.so $(DROPIN)-cuda/libamdhip64.so.$$v; done
	@echo "LD_LIBRARY_PATH=$$PWD/$(DROPIN)-cuda runs a HIP program that loads PTX on an NVIDIA GPU"

conformance: ## run foreign kernels and programs on the simulator (fetches packages from PyPI)
	@scripts/setup test
	CARGO='$(CARGO)' sim/conformance/run

gpu: ## run device tests, sanitizers and measurements on this machine's GPU
	@if command -v $(firstword $(CARGO)) >/dev/null; then CARGO='$(CARGO)' PROFILE=$(PROFILE) scripts/gpu-bundle; fi
	target/gpu/run $(STEPS)

gpu-bundle: ## pack what make gpu needs where there is no Rust into target/gpu
	@scripts/setup build
	CARGO='$(CARGO)' PROFILE=$(PROFILE) scripts/gpu-bundle

bench: ## measure prefill from C++ through the HIP runtime; without a GPU: a small sweep on the simulator
	@scripts/setup test
	$(CARGO) run --profile $(PROFILE) -p deltawave-cli -- info --save-kernels $(BENCH_OUT)/kernels >/dev/null
	benches/gdn_bench/build $(BENCH_OUT)/gdn_bench
	@$(BENCH_OUT)/gdn_bench $(BENCH) || { \
		status=$$?; [ $$status = 3 ] || exit $$status; \
		$(MAKE) --no-print-directory dropin >&2 && \
		LD_LIBRARY_PATH=$(DROPIN):$$LD_LIBRARY_PATH $(BENCH_OUT)/gdn_bench $(BENCH); }

bench-peers: ## measure beside FlashInfer, FlashQLA and FLA on an NVIDIA GPU: prefill, its backward, decode, norm, convolution, layer
	@if command -v $(firstword $(CARGO)) >/dev/null; then $(MAKE) --no-print-directory peers-library; fi
	python3 benches/peers $(PEERS)

bench-compare: ## compare prefill with FLA (and aiter: --aiter), its backward with FLA, on the simulator: counters, modelled times (fetches from PyPI)
	@scripts/setup test
	CARGO='$(CARGO)' benches/compare/run --pages docs/results $(COMPARE)

integrations: ## run transformers, FLA, SGLang and vLLM with deltawave on the simulator (fetches 8 GB from PyPI)
	$(CARGO) build --release -p deltawave-c
	python3 python/integrations/run.py $(INTEGRATIONS)

peers-library:
	DELTAWAVE_ARCHS=$${DELTAWAVE_ARCHS:-gfx942,sm_90a} $(CARGO) build --profile $(PROFILE) -p deltawave-c

peers-wheels: $(PIECES:%=$(CARRIED)/%.tar.xz) peers-library ## put what make bench-peers needs where there is no network into .whl
	cp -f target/$(PROFILE)/libdeltawave_c.so $(CARRIED)/

$(CARRIED)/%.tar.xz: benches/peers/pack.py
	python3 benches/peers/pack.py $(CARRIED) $*

ahead:
	@scripts/setup build
	@mkdir -p target
	$(RUSTC) --edition 2024 -O build/archive.rs -o target/archive-code-objects
	target/archive-code-objects $(CODE_OBJECTS) $(VERSION) $(subst $(COMMA), ,$(PACKED_ARCHS))

code-objects: ahead ## compile the kernels ahead of time, for builds without a compiler
	tar -C $(CODE_OBJECTS) --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cJf target/deltawave-code-objects-$(VERSION).tar.xz .
	@echo "DELTAWAVE_CODE_OBJECTS=$$PWD/$(CODE_OBJECTS) builds without a compiler of kernels"

wheel: ahead ## build the Python wheel with the C library, for glibc 2.28 and newer, in target/wheel/dist
	CARGO='$(CARGO)' DELTAWAVE_CODE_OBJECTS=$$PWD/$(CODE_OBJECTS) scripts/wheel

test-wheel: wheel ## check the wheel, install it into an empty environment and run README's Python lines there
	scripts/check-wheel target/wheel/dist/deltawave-$(VERSION)-*.whl

# The same with the library of the tests, which has the kernels of gfx942 alone: seconds.
test-wheel-quick:
	$(CARGO) build --profile $(PROFILE) -p deltawave-c
	CARGO='$(CARGO)' scripts/wheel target/$(PROFILE:dev=debug)/libdeltawave_c.a
	scripts/check-wheel --quick target/wheel/quick/deltawave-$(VERSION)-*.whl

install: ## install the C library with header, pkg-config and CMake files below PREFIX (/usr/local)
	@scripts/setup build
	$(CARGO) build --profile $(PROFILE) -p deltawave-c
	PREFIX='$(PREFIX)' scripts/install-c target/$(PROFILE:dev=debug)/libdeltawave_c.a

calibrate: ## the timing model beside published times, from the data in sim/calibration
	@python3 sim/calibration/calibrate.py

sanitize: ## look for undefined behaviour on the host: AddressSanitizer, valgrind, Miri
	@scripts/setup sanitize
	CARGO='$(CARGO)' PROFILE=$(PROFILE) scripts/sanitize $(SANITIZE)

lint: ## check formats, lints and documentation
	@scripts/setup lint
	$(CARGO) fmt --all --check
	clang-format-19 --dry-run -Werror $(HIP_SOURCES)
	@# Its builds serve nothing else, and it looks at no kernel.
	DELTAWAVE_ARCHS= DELTAWAVE_REQUIRE_KERNELS=0 $(CARGO) clippy --workspace --all-targets --profile $(PROFILE) -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --profile $(PROFILE)
	$(CARGO) package --workspace --no-verify --allow-dirty --quiet
	python3 docs/draw.py --check
	python3 scripts/check-docs --static
	scripts/check-types

check-docs: ## run the command blocks of README.md, python/README.md and docs/ on the simulator
	@scripts/setup test
	$(CARGO) build --release
	$(CARGO) build --release -p deltawave-c
	CHECK_DOCS_PATH="$$PATH" python3 scripts/check-docs

release-check: ## do all of a release but publish: package every crate, compile it from its archive, build the docs
	@scripts/setup build
	CARGO='$(CARGO)' python3 scripts/release-check

fmt: ## format Rust and HIP sources
	@scripts/setup lint
	$(CARGO) fmt --all
	clang-format-19 -i $(HIP_SOURCES)

doc: ## build the documentation
	$(CARGO) doc --workspace --no-deps --profile $(PROFILE)

setup: ## install what the other targets need (Debian, Ubuntu), or say what is missing
	@scripts/setup lint

clean: ## remove what was built
	$(CARGO) clean
