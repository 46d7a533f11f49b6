# The two commands: `make serve` talks, `make test` proves. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: serve chat test ui-test test-all check bench docs site zoo chaos update-chaos router-chaos soak sanitize mutants clean setup

setup:
	@PYTHON="$(PYTHON)" scripts/setup dev

serve:
	@PYTHON="$(PYTHON)" scripts/setup
	@exec $(BIN)/radixlm serve $(ARGS)

chat:
	@PYTHON="$(PYTHON)" scripts/setup
	@exec $(BIN)/radixlm chat $(ARGS)

# what one worker has compiled, the others and all processes that tests start need not compile again
test test-all chaos: export PYTHONDONTWRITEBYTECODE :=

test: setup
	@$(BIN)/python -m pytest -m "not slow and not gpu" -n 3 --dist worksteal $(ARGS)

ui-test: setup
	@$(BIN)/python -m pytest -n 0 tests/ui $(ARGS)

test-all: setup
	@$(BIN)/python -m pytest -m "not gpu" -n 3 --dist worksteal $(ARGS)

check: setup
	@scripts/check

bench: setup
	@$(BIN)/python bench/host.py
	@$(BIN)/radixlm bench offline --num-prompts 64 --random-input-len 256 --random-output-len 128

docs: setup
	@scripts/docs

site: setup
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' >.venv/docs.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r .venv/docs.txt
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

zoo: setup
	@PYTHON=$(BIN)/python sh zoo/build.sh $(ARGS)

chaos: setup
	@$(BIN)/python -m pytest -m "not gpu" tests/chaos $(ARGS)

update-chaos: setup
	@CHAOS_UPDATES=50 $(BIN)/python -m pytest tests/chaos/test_weight_updates.py $(ARGS)

router-chaos: setup
	@$(BIN)/python -m pytest -s -m slow tests/router $(ARGS)
	@$(BIN)/python bench/router_rolling.py

soak: setup
	@$(BIN)/python bench/soak.py $(ARGS)

sanitize: setup
	@$(BIN)/python -m pip install --quiet nanobind cmake ninja
	@PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON=python scripts/sanitize $(ARGS)

mutants: setup
	@$(BIN)/python -m pip install --quiet "cosmic-ray>=8.7,<9"
	@$(BIN)/python scripts/mutants.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
