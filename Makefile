# make demo and make test are the only commands a newcomer needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt Makefile
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip compiles what it installs, but not what an editable install points to: each start would do it anew where
# Python may write no bytecode.
COMPILE := $(BIN)/python -m compileall -q app analyzers capsules

.PHONY: demo test check bench clean

demo: $(VENV)/.installed
	$(BIN)/llmconsole demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks

# A training node has a torch that fits its driver: where $(PYTHON) can import one, the environment is
# layered on it and only the other pins apply. Everywhere else the tested versions are installed.
$(VENV)/.created: $(SOURCES)
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	    test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages $(VENV); \
	    grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt; \
	else \
	    test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	    cp constraints.txt $(VENV)/constraints.txt; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.created
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.created
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e '.[test]'
	@$(COMPILE)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(VENV)/.created
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e '.[test,dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

clean:
	rm -rf $(VENV) build *.egg-info
