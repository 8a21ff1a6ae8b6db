# Each of demo and test does all its own set-up; `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
PROCESSES ?= 2
# A second device in each process makes a step of the demo half as fast: two cores, some 50 collectives.
DEVICES ?= 1
# On two cores. Tests wait for processes for a fifth of the time. The slow ones took CI 76 minutes with a third worker.
WORKERS ?= 3
SLOW_WORKERS ?= 2
FUZZ_S ?= 600
AS_USERS_COMPILE := XLA_FLAGS= LOCKSTEP_TEST_KEEP=XLA_FLAGS

# Where an image sets this variable, every process compiles all that it imports anew: 8 s instead of 4.
export PYTHONDONTWRITEBYTECODE :=
export JAX_PLATFORMS := cpu
# tests/isolation.py makes the environment of the tests; these pytest reads before it.
unexport PYTEST_ADDOPTS PYTEST_PLUGINS PYTHONPATH PYTHONHOME PYTHONWARNINGS

.PHONY: help setup setup-tests demo rl-demo agent-demo test slow nightly test-jax-0.12 test-newest fuzz docs links lint format types
help: ## show this list
	@echo "Usage: make TARGET"
	@sed -nE 's/^([a-z0-9.-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -nE 's/^([a-z0-9.-]+):.*## (.*)/  make \1: \2/p' $(MAKEFILE_LIST)

setup: ## make the environment in .venv (the other targets do it themselves)
	@scripts/setup.sh dev
setup-tests:
	@scripts/setup.sh dev plan levanter tunix browser eval readers docs

demo: setup ## train a small model on two simulated hosts and watch what it says (about 3 minutes)
	@$(PYTHON) infra/launch.py --backend local --processes $(PROCESSES) --devices_per_process $(DEVICES) -- \
		lockstep train-lm --config_path config/demo.yaml $(ARGS)

# A run directory of an earlier demo would be refused: both runs begin anew.
rl-demo: setup ## teach the demo's model for 250 steps, then let it learn sums from rewards alone (about 6 minutes)
	@rm -rf runs/rl-demo-sft runs/rl-demo
	@echo "rl-demo, 1 of 2: a model is taught number words and sums, until it answers about a third of the sums"
	@$(PYTHON) infra/launch.py --backend local --processes $(PROCESSES) --devices_per_process $(DEVICES) -- \
		lockstep train-lm --config_path config/demo.yaml --trainer.run_id rl-demo-sft \
		--trainer.num_train_steps 250 --trainer.train_batch_size 128 --optimizer.learning_rate 3e-3 --optimizer.beta2 0.95 \
		--trainer.tracker '{type: jsonl}' --inference_eval.enabled false
	@echo "rl-demo, 2 of 2: it goes on with rewards alone; reward is the share of right answers, (last 10: ...) its trend"
	@$(PYTHON) infra/launch.py --backend local --processes $(PROCESSES) --devices_per_process $(DEVICES) -- \
		lockstep train-grpo --config_path config/grpo_demo.yaml --trainer.run_id rl-demo $(ARGS)

agent-demo: setup ## let a small model learn, from rewards alone, to call a calculator and to use its result
	@rm -rf runs/agent-demo
	@$(PYTHON) examples/agent_demo/demo.py $(ARGS)

test: setup-tests ## run the tests (ARGS='-k name' narrows them)
	@$(PYTHON) -m pytest -n $(WORKERS) $(ARGS)

slow: setup-tests ## run the slow tests, a demo with a smaller model among them
	@$(PYTHON) -m pytest -m "slow and not nightly and not optimized" -n $(SLOW_WORKERS) $(ARGS) || [ $$? = 5 ]
	@$(AS_USERS_COMPILE) $(PYTHON) -m pytest -m "slow and not nightly and optimized" -n $(SLOW_WORKERS) $(ARGS) || [ $$? = 5 ]

nightly: setup-tests ## run the longest tests, most with a sibling in make slow, fuzz, and test-newest
	@$(AS_USERS_COMPILE) $(PYTHON) -m pytest -m nightly -n $(SLOW_WORKERS) $(ARGS)
	@$(MAKE) --no-print-directory fuzz
	@$(MAKE) --no-print-directory test-newest

test-jax-0.12: setup-tests ## run the tests with jax 0.12 and the newest of the rest, without Levanter and Tunix, which pin 0.11
	@scripts/test_versions.sh jax-0.12 -m "not slow and not nightly" -n $(WORKERS) $(ARGS)

test-newest: setup-tests ## run the tests with the newest of everything, pre-releases of jax too; part of make nightly
	@scripts/test_versions.sh newest -m "not slow and not nightly" -n $(WORKERS) $(ARGS)

fuzz: setup-tests ## read what somebody could hand over, made up anew, for FUZZ_S seconds (default: 600)
	@LOCKSTEP_FUZZ_SECONDS=$(FUZZ_S) $(PYTHON) -m pytest -s tests/fuzz $(ARGS)

# The variable: without it mkdocs-material prints an advertisement of its successor into every log.
# The page of the API reads the modules for Levanter and Tunix too, so their packages have to be there.
docs: ## build the documentation site in build/site; a link or an anchor that leads nowhere is an error
	@scripts/setup.sh dev docs levanter tunix
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict
	@echo "docs: open build/site/index.html"

links: ## look at every outside link of the documents, which needs a network; .github/workflows/site.yml does each week
	@python3 scripts/check_links.py

lint: setup ## check style and formatting, scripts, and words and lengths of the documents
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@.venv/bin/shellcheck scripts/*.sh
	@$(PYTHON) -m check_jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(PYTHON) scripts/lint_docs.py

format: setup ## mend style and formatting
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

types: setup ## check types
	@$(PYTHON) -m mypy
