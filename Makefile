# Every target makes its own .venv from $(PYTHON), with the versions of constraints.txt; only
# gpu-report runs on the Python it is given, with no network.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet -c constraints.txt
PYTEST := $(BIN)/python -m pytest
# A process a core, of one thread each: two pools of threads on the same cores wait for each other.
PARALLEL := -n auto --dist worksteal
# As on a CPU without more than these vector instructions: make test-cpu LEVEL=avx2 (or default).
LEVEL :=
AT_LEVEL := $(if $(LEVEL),ATEN_CPU_CAPABILITY=$(LEVEL))

# The oldest and the newest Triton that is supported.
TRITONS := 3.6.0 3.9.0
# The oldest Transformers; constraints.txt has the newest.
TRANSFORMERS := 5.17.0
# Without a GPU, PyTorch's build for CPUs alone will do: the other one brings gigabytes of CUDA. It
# is on PyTorch's own index; where that is not reached, the other one is installed.
TORCH_CPU := https://download.pytorch.org/whl/cpu
HAS_GPU := $(shell command -v nvidia-smi; ls /dev/nvidia* 2>/dev/null)
CPU_BUILD := $(if $(HAS_GPU),,$(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)))
REACHES_TORCH_CPU := from urllib.request import urlopen; urlopen('$(TORCH_CPU)/torch/', timeout=10)
# quick: what `make test` runs (tests/quick.py); rest: what it leaves; all.
PART := all

.PHONY: demo test test-rest test-all test-docs test-gpu test-device test-compile test-triton test-transformers test-study test-eval \
	test-study-killed test-cpu test-slow bench gpu-report docs lint clean

demo: $(VENV)/.base
	$(BIN)/fastplm demo

# What a change most often breaks, in every part. The lanes run one after another, the CPU lane
# last, and each closes with its own count.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory test-gpu PART=quick
	@$(MAKE) --no-print-directory test-compile PART=quick
	@$(MAKE) --no-print-directory test-cpu PART=quick

# Everything but the slow lane, without what `make test` has run already.
test-rest: $(VENV)/.test
	@$(MAKE) --no-print-directory test-gpu PART=rest
	@$(MAKE) --no-print-directory test-compile PART=rest
	@$(MAKE) --no-print-directory test-triton
	@$(MAKE) --no-print-directory test-transformers
	@$(MAKE) --no-print-directory test-transformers TRANSFORMERS=5.24.0
	@$(MAKE) --no-print-directory test-study
	@$(MAKE) --no-print-directory test-eval
	@$(MAKE) --no-print-directory test-cpu PART=rest

test-all: test
	@$(MAKE) --no-print-directory test-rest

# After a change of pages alone: the site, what pages promise, and the tables that are in the code.
test-docs: $(VENV)/.test
	$(call lane,docs,TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) -m "not gpu and not slow" -k "docs or page or contributing or questions" \
		tests/docs tests/test_layout.py tests/test_rules.py tests/models/test_parameter_counts.py tests/models/test_padding.py \
		tests/pretrain/test_presets.py tests/study/test_study.py tests/ptx/test_barriers.py tests/compile/test_step_model.py)

# $(1) name, $(2) environment and pytest arguments
define lane
	@echo "== $(1) lane =="
	@start=$$(date +%s); $(2); code=$$?; echo "== $(1) lane: $$(($$(date +%s) - start)) s =="; exit $$code
endef

# Without a device every test of it would be collected, and skipped: that takes half a minute.
test-gpu: $(VENV)/.test
	@if $(BIN)/python -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then \
		$(MAKE) --no-print-directory test-device; \
	else \
		echo "no CUDA device: the gpu lane is skipped"; \
	fi

test-device: $(VENV)/.test
	$(call lane,gpu,$(PYTEST) --part $(PART) -m gpu)

test-compile: $(VENV)/.test
	$(call lane,compile,$(AT_LEVEL) OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) --part $(PART) -rs tests/compile tests/ptx -m "not slow")

# Every kernel compiles under other Tritons than that of constraints.txt, which may be out of reach.
test-triton: $(TRITONS:%=test-triton-%)

test-triton-%: $(VENV)/.test
	@if $(MAKE) --no-print-directory $(VENV)/triton-$*; then \
		$(MAKE) --no-print-directory test-triton-there-$*; \
	else \
		echo "Triton $* cannot be installed: its lane is skipped"; \
	fi

test-triton-there-%:
	$(call lane,Triton $*,PYTHONPATH=$(VENV)/triton-$* OMP_NUM_THREADS=1 $(BIN)/python tools/compile_kernels.py --once --arch 90)

# Every class equals its parent there, and the calls of whole layers are used.
test-transformers: $(VENV)/.test
	@if $(MAKE) --no-print-directory $(VENV)/transformers-$(TRANSFORMERS); then \
		$(MAKE) --no-print-directory test-transformers-there; \
	else \
		echo "Transformers $(TRANSFORMERS) cannot be installed: its lane is skipped"; \
	fi

test-transformers-there:
	$(call lane,Transformers $(TRANSFORMERS),PYTHONPATH=$(CURDIR)/$(VENV)/transformers-$(TRANSFORMERS) OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) -rs tests/models tests/test_hub_kernel.py -m "not gpu and not slow" -k "equals_its_parent or its_error_is_that_of_the_parent or bias_on_the_scores")

# Snakemake wants another packaging than constraints.txt, so it has a folder of its own.
test-study: $(VENV)/.test
	@if $(MAKE) --no-print-directory $(VENV)/study; then \
		$(MAKE) --no-print-directory test-study-there; \
	else \
		echo "Snakemake cannot be installed: the study lane is skipped"; \
	fi

test-study-there:
	$(call lane,study,PYTHONPATH=$(CURDIR)/$(VENV)/study OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) -rs tests/study -m slow -k "not killed")

# lm-evaluation-harness, of which some packages want other versions than constraints.txt.
test-eval: $(VENV)/.test
	@if $(MAKE) --no-print-directory $(VENV)/eval; then \
		$(MAKE) --no-print-directory test-eval-there; \
	else \
		echo "lm-evaluation-harness cannot be installed: its lane is skipped"; \
	fi

test-eval-there:
	$(call lane,lm-evaluation-harness,PYTHONPATH=$(CURDIR)/$(VENV)/eval OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) -rs tests/inference/test_lm_eval.py)

# At random moments, so no lane of every day.
test-study-killed: $(VENV)/study
	$(call lane,killed study,PYTHONPATH=$(CURDIR)/$(VENV)/study OMP_NUM_THREADS=1 $(PYTEST) tests/study -m slow -k killed)

test-cpu: $(VENV)/.test
	$(call lane,interpreter and CPU,$(AT_LEVEL) TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) --part $(PART) -rs -m "not gpu and not slow" --ignore=tests/compile --ignore=tests/ptx)

test-slow: $(VENV)/.test
	$(call lane,slow,$(AT_LEVEL) OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) -m slow)

# Beside the peers that PyTorch brings; any other one that is installed joins in.
bench: $(VENV)/.test $(VENV)/.peers
	$(PYTEST) benchmarks/ --benchmark-only --rows benchmarks/results
	$(BIN)/python benchmarks/plots.py

# ARGS: options of the script, as in make gpu-report ARGS='--only attention BERT'.
ARGS :=
gpu-report:
	$(PYTHON) benchmarks/gpu_report.py $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/triton-%: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$*

# It wants an older huggingface_hub, which wants httpx.
$(VENV)/transformers-%: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps --target $@ transformers==$* huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9

$(VENV)/study: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --target $@ "snakemake==9.27.1" "snakemake-executor-plugin-slurm==2.8.0"

# The packages that a task imports, of all that it asks for.
$(VENV)/eval: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps --target $@ lm-eval==0.4.13 chardet==6.0.0.post1 dataproperty==1.1.1 \
		mbstrdecoder==1.1.5 pathvalidate==3.3.1 pytablewriter==1.2.1 pytz==2026.6 sqlitedict==2.1.0 tabledata==1.3.5 tcolorpy==0.1.7 typepy==1.3.5

clean:
	rm -rf $(VENV) build dist site *.egg-info fastplm/_*.so .pytest_cache .mypy_cache .ruff_cache

# The build uses the torch installed here: an isolated build environment would fetch another one.
$(VENV)/.base: pyproject.toml setup.py constraints.txt $(wildcard csrc/*/*)
	@echo "Installing PyTorch and the rest into $(VENV): some minutes the first time."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel ninja
	$(PIP) torch $$(test "$(CPU_BUILD)" && $(BIN)/python -c "$(REACHES_TORCH_CPU)" 2>/dev/null && echo --extra-index-url $(TORCH_CPU))
	@echo "Compiling csrc/: 2 to 3 minutes on 2 free cores, many more on busy ones."
	$(PIP) --no-build-isolation --editable .
	@$(BIN)/python -c "from fastplm._extension import lacks; print('csrc/:', lacks('mask_tokens', 'CPU') or 'built')"
	touch $@

# It is installed already, so this adds what the extra asks for and builds nothing again. The version
# that it is: pip must not fall back on one of the index.
$(VENV)/.test $(VENV)/.docs $(VENV)/.peers $(VENV)/.lint: $(VENV)/.%: $(VENV)/.base
	$(PIP) "fastplm-torch[$*]==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("fastplm-torch"))')"
	touch $@

# The site is built by a test.
$(VENV)/.test: $(VENV)/.docs
