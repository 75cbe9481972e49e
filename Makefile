# Everything runs in .venv, which is made afresh whenever pyproject.toml changes.

PYTHON := $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || echo python3)
BIN := .venv/bin
SECONDS := 60
# Of the system calls at which a command is made to fail: every so manieth.
FAULTS := 1
# Random trials, as many times as make test makes.
TRIALS := 25
# Of processes for the tests, which wait for what they start and for the disk: four keep two cores busy.
WORKERS := 4
PYTHONS := 3.12 3.13
TORCHES := 2.4.1 2.6.0 2.9.1 2.11.0 2.15.0
CORE := tests/core tests/serialization tests/formats tests/engine tests/matrix
READY := .venv/ready-$(shell (pwd; cat pyproject.toml) | cksum | cut -d' ' -f1)
AZURITE := .venv/npm/node_modules/.bin/azurite-blob
TORCHTITAN := .venv-torchtitan/ready
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# Compiling the package anew at each start takes as long as the start itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help test check suites lint coverage demo bench fuzz mutations stores faults pages torchtitan matrix \
	compatibility package clean

help: ## Show this list.
	@sed -n 's/^\([a-z]*\):.*## /  make \1 - /p' Makefile

$(READY):
	@echo "making .venv: 2 GB, or 7 GB with torch's libraries for CUDA; minutes, the first time"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip --disable-pip-version-check install -e '.[dev]'
	@touch $(READY)

lint: $(READY) ## Style, format and types.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint ## Style, format, types and every test.
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

suites: $(READY) ## What make test skips: stores, torchtitan, pages, faults, more mutations; each where its tool is or can be installed.
	@.ci/suites

check: test suites ## What CI runs.

coverage: $(READY) ## Every test, and which lines none of them runs; fails below pyproject.toml's floor.
	@$(BIN)/coverage erase
	@COVERAGE_FILE="$(CURDIR)/.coverage" $(BIN)/coverage run -m pytest -n 2
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

demo: $(READY) ## Train a small model on 4 ranks, and show every command on what it saves.
	@PATH="$(CURDIR)/$(BIN):$$PATH" python fixtures/demo.py

bench: $(READY) ## Measure ckptool's commands against cp, torch's own tools, other loaders and clients of a store.
	@PYTHONPATH=tests $(BIN)/python -m benchmarks transfer
	@PYTHONPATH=tests $(BIN)/python -m benchmarks merges
	@PYTHONPATH=tests $(BIN)/python -m benchmarks loads
	@PYTHONPATH=tests $(BIN)/python -m benchmarks stores --size 2.16GB --repeat 3

fuzz: $(READY) ## Fuzz each parser for a minute; what crashes one lies in tests/fuzz/crashes.
	@$(PIP) install -e '.[fuzz]'
	@for name in pickle metadata zip safetensors index; do \
		echo "fuzzing $$name"; mkdir -p tests/fuzz/crashes/$$name; \
		$(BIN)/python tests/fuzz/fuzz_target.py $$name -max_total_time=$(SECONDS) -max_len=16384 -timeout=10 \
			-rss_limit_mb=2048 -artifact_prefix=tests/fuzz/crashes/$$name/ -print_final_stats=0 \
			|| exit 1; \
		rmdir --ignore-fail-on-non-empty tests/fuzz/crashes/$$name; \
	done
	@rmdir --ignore-fail-on-non-empty tests/fuzz/crashes

mutations: $(READY) ## Damage checkpoints in 5,000 ways, outputs in 2,000, prune 1,000 runs; the tests do less.
	@CKPTOOL_TRIALS=$(TRIALS) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "trials or hypothesis"

$(AZURITE): | $(READY)
	@$(PIP) install -e '.[azure]'
	@npm install --silent --no-audit --no-fund --prefix .venv/npm azurite@3.37.0

stores: $(AZURITE) ## Read and write an emulator of Azure's blobs, too (needs npm).
	@PATH="$(CURDIR)/$(dir $(AZURITE)):$$PATH" $(BIN)/python -m pytest -q \
		tests/remote/test_emulators.py tests/remote/test_other_clients.py tests/remote/test_other_refusals.py

# torchtitan takes another fsspec than the clients of stores; all else is .venv's.
$(TORCHTITAN): $(READY)
	@rm -rf $(@D)
	@$(BIN)/python -m venv $(@D)
	@ls -d $(CURDIR)/.venv/lib/python3.*/site-packages > "$$(ls -d $(@D)/lib/python3.*/site-packages)/venv.pth"
	@$(@D)/bin/python -m pip -qq --disable-pip-version-check install torchtitan==0.3.0 triton \
		flash-linear-attention==0.6.0 2> $(@D)/pip.log || { cat $(@D)/pip.log; exit 1; }
	@touch $@

torchtitan: $(TORCHTITAN) ## Compare key maps with torchtitan's own adapters, and rank files with torch_checkpointing.
	@$(dir $(TORCHTITAN))bin/python -m pytest -q -k "torchtitan or library" \
		tests/maps/test_torchtitan.py tests/formats/rank_files/test_other_readers.py

pages: $(READY) ## Draw --html's pages in a browser (needs chromium); pictures are in build/pages.
	@mkdir -p build/pages && CKPTOOL_PAGES=build/pages $(BIN)/python -m pytest -q tests/render/html

faults: $(READY) ## Kill and fail each command at every system call that changes the disk (needs strace).
	@command -v strace > /dev/null || { echo "make faults needs strace: apt-get install strace"; exit 1; }
	@CKPTOOL_FAULTS=$(FAULTS) $(BIN)/python -m pytest -n 2 -q tests/commands/test_disk_faults.py tests/engine/write/test_stage.py

matrix: $(READY) ## The core's tests on other Pythons; saves and loads by other torches (CKPTOOL_TORCH_AT).
	@for version in $(PYTHONS); do \
		python$$version -c "" 2> /dev/null || { echo "no python$$version here: skipped"; continue; }; \
		echo "Python $$version"; \
		test -e .venv-$$version/ready || { rm -rf .venv-$$version && python$$version -m venv .venv-$$version \
			&& .venv-$$version/bin/pip install -qq --disable-pip-version-check -e '.[dev]' \
			&& touch .venv-$$version/ready; } || exit 1; \
		.venv-$$version/bin/python -m pytest -n 2 $(CORE) || exit 1; \
	done
	@test -z "$$CKPTOOL_TORCH_AT" || CKPTOOL_TORCHES="$(TORCHES)" $(BIN)/python -m pytest tests/matrix

compatibility: $(READY) ## Read what each version of a framework writes, and resume from what is made of it .
	@$(BIN)/python tests/compatibility $(WRITERS)

package: ## Build what is published, check it, and install it where nothing else is; also with the oldest dependencies.
	@rm -rf dist .venv-package
	@for name in build fresh oldest; do $(PYTHON) -m venv .venv-package/$$name || exit 1; done
	@.venv-package/build/bin/python -m pip -qq --disable-pip-version-check install 'build>=1.2' 'twine>=6.1'
	@.venv-package/build/bin/python -m build
	@.venv-package/build/bin/twine check --strict dist/*
	@.venv-package/fresh/bin/python -m pip -qq --disable-pip-version-check install dist/*.whl
	@test "$$(.venv-package/fresh/bin/ckptool --version | tr ' ' -)" = "$$(basename dist/*.tar.gz .tar.gz)"
	@.venv-package/fresh/bin/ckptool --version
	@sed -n '/^dependencies/,/^]/s/^ *"\([a-z_]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml > .venv-package/oldest.txt
	@.venv-package/oldest/bin/python -m pip -qq --disable-pip-version-check install dist/*.whl -r .venv-package/oldest.txt
	@for words in "convert --help-all" "help verify" "inspect fixtures/dcp_base/ckpt" "verify fixtures/dcp_base/ckpt" \
		"convert fixtures/dcp_base/ckpt .venv-package/out.safetensors"; do \
		.venv-package/oldest/bin/ckptool $$words > /dev/null || exit 1; done

clean: ## Remove all that make makes.
	@rm -rf .venv .venv-* demo bench-out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
