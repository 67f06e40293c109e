# Each target does all of its own set-up; a virtual environment is rebuilt when its pins change.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
# Two cores: two test processes of one thread each beat one process of two.
TEST_FLAGS := -n 2 --dist worksteal

export OMP_NUM_THREADS ?= 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: demo test test-slow test-oldest lint clean

demo: $(VENV)/.ready
	OMP_NUM_THREADS=2 $(VENV)/bin/hf-wsvd demo --output-dir demo-out

test: $(VENV)/.ready lint
	$(VENV)/bin/pytest $(TEST_FLAGS) -m "not slow"

test-slow: $(VENV)/.ready
	$(VENV)/bin/pytest $(TEST_FLAGS) -m slow

test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/pytest $(TEST_FLAGS) -m "not slow"

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/.ready: constraints.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt torch
	$(VENV)/bin/pip install -q -c constraints.txt -e ".[test]"
	touch $@

$(OLDEST)/.ready: constraints-oldest.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/pip install -q -c constraints-oldest.txt torch
	$(OLDEST)/bin/pip install -q -c constraints-oldest.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist demo-out *.egg-info
