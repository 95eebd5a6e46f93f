# What a person or a pipeline asks for; how it is built stands in CMakeLists.txt and CMakePresets.json.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: help setup ready build demo test clients bench lint format sanitize fuzz soak clean

FUZZ_SECONDS ?= 20
SOAK_MINUTES ?= 10
ifdef GRID
export WEFT_TEST_GRID := $(GRID)
endif

# CTest runs nothing beside tests that measure time (RUN_SERIAL), so two jobs are right for all of them.
CTEST := ctest -j2 --output-on-failure --no-tests=error
WEFT := build/release/weft

help: ## this list
	@echo "weft: make TARGET"
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-10s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what is missing (every target does so; this tries again after a failure)
	@tools/setup --retry && echo "setup: done"

ready:
	@tools/setup

build: ready ## build/release: libraries, command, tests
	@tools/build release

demo: ready ## a model trained by 4 ranks over a slow link under six schemes: a table and a page, in a few minutes
	@tools/build release commands
	@if [[ -x build/release/weft-torch ]]; then rm -rf build/demo; \
	  $(WEFT) compare --out build/demo --ranks 4 --link 100mbit,50us --steps 20 \
	    --vocabulary 8000 --width 192 --layers 4 --heads 4 --context 64; \
	  echo "That was gradients. The other three, each in a minute (docs/guide.md says when they pay):"; \
	  echo "  tables   $(WEFT) compare --model lm --samples 2000 --ranks 4 --link 100mbit,50us --tables allgather,embrace --steps 10"; \
	  echo "  experts  $(WEFT) compare --model gpt-moe --preset tiny --mesh ep=4 --ranks 4 --link 100mbit,50us --policies plain,tutel,lina"; \
	  echo "  stages   $(WEFT) compare --preset tiny --layers 4 --mesh dp=2,pp=2 --accumulate 4 --ranks 4 --link 10mbit,50us --variants dense,powersgd,powersgd+backward-rank=2"; \
	else echo "built without LibTorch (make setup says why), so no model is trained: all-reduce and priorities instead"; \
	  $(WEFT) bench allreduce --ranks 4 --link 1gbit,50us --bytes 1MiB..16MiB; \
	  $(WEFT) bench priority --ranks 4 --link 1gbit,50us; fi

# The core is compiled as release is, but for the four files that ask which transports there are: what runs in virtual time is the
# same code again, and is not run again.
test: build ## all tests, the core alone, ASan on unit+ranks (GRID=full: the large grids)
	@[[ $$(id -u) == 0 ]] || echo "netlab tests need root: they will be skipped"
	@$(CTEST) --test-dir build/release || { echo "make test: a release test failed, see above"; exit 1; }
	@tools/build core
	@$(CTEST) --test-dir build/core -LE '^(sim|virtual)$$' || { echo "make test: a test of the core alone failed, see above"; exit 1; }
	@tools/build asan tests_unit tests_ranks
	@$(CTEST) --test-dir build/asan -L '^(unit|ranks)$$' || { echo "make test: a test failed under ASan, see above"; exit 1; }

clients: ready ## Lightning, accelerate and transformers train with weft's hook (installs them into build/clients)
	@tools/build release weft_python weft_cli
	@tests/clients/run

bench: build ## measure and write the tables of docs/results (bench/tables --help)
	@bench/tables

lint: ready ## format, clang-tidy, include direction, public headers, coroutine rules
	@tools/lint

format: ready ## rewrite the C++ files with clang-format 19
	@tools/lint --format

sanitize: ready ## all tests under ASan+UBSan and under TSan
	@tools/build asan
	@$(CTEST) --test-dir build/asan || { echo "make sanitize: a test failed under ASan, see above"; exit 1; }
	@tools/build tsan
	@$(CTEST) --test-dir build/tsan || { echo "make sanitize: a test failed under TSan, see above"; exit 1; }

fuzz: ready ## each fuzz target for FUZZ_SECONDS (20)
	@tools/build fuzz
	@tests/fuzz/run $(FUZZ_SECONDS)

soak: export WEFT_TEST_GRID := full
soak: export WEFT_SOAK := 1
soak: ready ## sim and ranks tests with full grids, over and over for SOAK_MINUTES (10)
	@tools/build release
	@end=$$((SECONDS + $(SOAK_MINUTES) * 60)); export WEFT_SOAK_ROUND=0; \
	while ((WEFT_SOAK_ROUND == 0 || SECONDS < end)); do \
	  WEFT_SOAK_ROUND=$$((WEFT_SOAK_ROUND + 1)); echo "== soak: round $$WEFT_SOAK_ROUND =="; \
	  $(CTEST) --test-dir build/release -L '^(sim|ranks)$$' || \
	    { echo "make soak: round $$WEFT_SOAK_ROUND failed (WEFT_SOAK_ROUND repeats it)"; exit 1; }; \
	done; echo "soak: $$WEFT_SOAK_ROUND rounds passed"

clean: ## remove build/
	rm -rf build
