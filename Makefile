# Two commands do all the set-up: `make demo` and `make test`. `make test-fast` is for the one who edits, and
# `make test-all` is what CI runs.
# PYTHON chooses the interpreter (3.11 or newer), PIP_ARGS adds pip options, e.g. a package index; VARIANT is the
# demo's model: one of artifacts/tiny, which have learned from drawn videos, or a toy with random weights, one that
# `wanbuild toy --help` lists. SAMPLING=four-steps takes the distilled student of a tiny text to video. PORT is that of
# `make serve`; 0 takes a free one.
PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv
DEMO ?= artifacts/demo
VARIANT ?= wan2.1-t2v
SAMPLING ?=
PORT ?= 8000
LIVE ?= artifacts/live

BIN := $(VENV)/bin
TINYWAN := PYTHONPATH=training $(BIN)/python -m tinywan

SAMPLES := $(DEMO)/checkpoint/media
ifneq ($(wildcard artifacts/tiny/$(VARIANT)/model_index.json),)
CHECKPOINT := artifacts/tiny/$(VARIANT)
PROMPT ?= a red ball rolls to the right over green ground
# An image to begin with, for the model that takes one.
PREPARE = $(if $(findstring i2v,$(VARIANT)),$(TINYWAN) draw "$$PROMPT" --output $(DEMO)/first_frame.png)
MEDIA_wan2.1-i2v := --image $(DEMO)/first_frame.png
SIZE := 96x64
SHOW := --at-least 0.9
else
CHECKPOINT := $(DEMO)/checkpoint
PROMPT ?= A red fox runs through fresh snow at dawn
PREPARE = $(BIN)/wanbuild toy $(CHECKPOINT) --variant $(VARIANT)
MEDIA_wan2.1-i2v := --image $(SAMPLES)/image.png
SIZE := 192x128
SHOW := --no-score
NOTE := $(VARIANT) has no trained checkpoint: its weights are random, and the video is noise.
endif

# A shell gets it as it is, with its quotes.
export PROMPT

# A student is an adapter of the same artifact, whose programs have slots for it: `make again` without SAMPLING
# takes 30 steps with guidance.
ifneq ($(SAMPLING),)
ifneq ($(SAMPLING),four-steps)
$(error SAMPLING is four-steps or empty, not $(SAMPLING))
endif
STUDENTS := artifacts/tiny/four-steps
STUDENT_wan2.1-t2v := $(STUDENTS)/wan2.1-t2v.safetensors
STUDENT_wan2.2-t2v := --lora-high $(STUDENTS)/wan2.2-t2v-high-noise.safetensors \
	--lora-low $(STUDENTS)/wan2.2-t2v-low-noise.safetensors
ifeq ($(STUDENT_$(VARIANT)),)
$(error only wan2.1-t2v and wan2.2-t2v have a student of four steps)
endif
SLOTS := --lora-rank 16
ADAPT = $(BIN)/wanbuild lora $(STUDENT_$(VARIANT)) --artifact $(DEMO)/new --name four-steps --sampling lightning-4
CHOSEN := --lora four-steps
endif

MEDIA_wan2.1-flf2v := --image $(SAMPLES)/image.png --last-image $(SAMPLES)/last_image.png
MEDIA_wan2.2-i2v := --image $(SAMPLES)/image.png
MEDIA_wan2.2-ti2v := --image $(SAMPLES)/image.png
MEDIA_wan2.1-vace := --video $(SAMPLES)/video --mask $(SAMPLES)/mask
MEDIA_wan2.2-vace := $(MEDIA_wan2.1-vace)
MEDIA_wan2.2-animate := --image $(SAMPLES)/image.png --pose-video $(SAMPLES)/pose_video \
	--face-video $(SAMPLES)/face_video

PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS)
SETUP := pyproject.toml constraints.txt

# Each command that a test starts would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

# What tests compile is kept here for the next time.
PYTEST := WAN_TEST_CACHE=$(abspath $(VENV))/test-cache $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo again live serve test test-all test-fast docs gpu-dry-run compilers lint format clean

# What a GPU was lent with: another Python, and another jax than constraints.txt pins.
GPU_PYTHON ?= python3.12
GPU_JAX ?= 0.11.2

# The last demo's artifact stays until the new one is whole.
demo: $(VENV)/.installed-build
	mkdir -p "$(DEMO)"
	$(PREPARE)
	rm -rf "$(DEMO)/new"
	$(BIN)/wanbuild convert $(CHECKPOINT) --artifact $(DEMO)/new --default steps=30
	$(BIN)/wanbuild compile --artifact $(DEMO)/new --target cpu --size $(SIZE) --frames 17 $(SLOTS)
	$(ADAPT)
	$(BIN)/wanbuild verify --artifact $(DEMO)/new --record
	rm -rf "$(DEMO)/artifact"
	mv $(DEMO)/new $(DEMO)/artifact
	$(BIN)/wanrun --artifact $(DEMO)/artifact --prompt "$$PROMPT" $(MEDIA_$(VARIANT)) $(CHOSEN) \
		--output $(DEMO)/demo.mp4 --overwrite --timing --timing-json $(DEMO)/timing.json
	$(TINYWAN) show $(DEMO)/demo.mp4 --prompt "$$PROMPT" --sheet $(DEMO)/demo.png $(SHOW)
	@echo "The video is $(DEMO)/demo.mp4, the timings are $(DEMO)/timing.json.$(if $(NOTE), $(NOTE))"

# Another prompt, by the demo's artifact as it is.
again:
	@test -f $(DEMO)/artifact/manifest.json || { echo "there is no demo yet: run make demo first"; exit 2; }
	@grep -q '"variant": "$(VARIANT)"' $(DEMO)/artifact/manifest.json || \
		{ echo "the demo is of another variant than $(VARIANT): give make again its VARIANT=..."; exit 2; }
	$(PREPARE)
	$(BIN)/wanrun --artifact $(DEMO)/artifact --prompt "$$PROMPT" $(MEDIA_$(VARIANT)) $(CHOSEN) \
		--output $(DEMO)/again.mp4 --overwrite --timing
	$(TINYWAN) show $(DEMO)/again.mp4 --prompt "$$PROMPT" --sheet $(DEMO)/again.png $(filter --no-score,$(SHOW))
	@echo "The video is $(DEMO)/again.mp4.$(if $(NOTE), $(NOTE))"

# The demo's artifact behind an API, with its page in the browser; make demo first, or this does it.
serve: $(VENV)/.installed-serve
	@test -f $(DEMO)/artifact/manifest.json || $(MAKE) demo
	$(BIN)/wanrun serve demo=$(DEMO)/artifact --data $(DEMO)/videos --port $(PORT) --open

# A tiny model of live video behind an API, with its page in the browser: choose Live, and send another prompt while it
# plays.
live: $(VENV)/.installed-build $(VENV)/.installed-serve
	@test -f $(LIVE)/artifact/manifest.json || $(MAKE) $(LIVE)/artifact
	$(BIN)/wanrun serve live=$(LIVE)/artifact --data $(LIVE)/videos --port $(PORT) --open

$(LIVE)/artifact:
	mkdir -p "$(LIVE)"
	rm -rf "$(LIVE)/new"
	$(BIN)/wanbuild convert artifacts/tiny/self-forcing --artifact $(LIVE)/new
	$(BIN)/wanbuild compile --artifact $(LIVE)/new --target cpu --size 96x64 --frames 45
	mv $(LIVE)/new $(LIVE)/artifact

# Marks at the tests decide which of the three has them: see tests/helpers/tiers.py.
test: $(VENV)/.installed-test lint
	$(PYTEST) -m "not thorough" tests

test-all: $(VENV)/.installed-test lint
	$(PYTEST) tests

# The compilers for TPUs and NVIDIA GPUs: 1.3 GB. With them `make test-all` compiles for chips that are not here too.
compilers: $(VENV)/.installed-compilers

# Without torch, which need not be installed.
test-fast: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m "not slow" --without-torch --ignore tests/parity tests

# The pages as a site. A link or an anchor that leads nowhere is an error, as is a page that the navigation lacks.
docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -q -E -W --keep-going -c docs/site -d $(VENV)/doctrees . dist/site
	@echo "The site begins at dist/site/index.html."

# benchmarks/gpu.py to its end on this CPU, in an environment like that of a GPU, where the project is not installed.
gpu-dry-run:
	$(GPU_PYTHON) -m venv $(VENV)-gpu
	grep -vE '^(jax|jaxlib|flax)' constraints.txt > $(VENV)-gpu/constraints.txt
	$(VENV)-gpu/bin/python -m pip install --disable-pip-version-check -q -c $(VENV)-gpu/constraints.txt $(PIP_ARGS) \
		-e ".[build,serve]" jax==$(GPU_JAX)
	$(VENV)-gpu/bin/python -m pip uninstall -q -y wanrun
	$(VENV)-gpu/bin/python benchmarks/gpu.py --smoke

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-build: $(VENV)/bin/python $(SETUP)
	$(PIP) -e ".[build]"
	touch $@

$(VENV)/.installed-serve: $(VENV)/bin/python $(SETUP)
	$(PIP) -e ".[build,serve]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python $(SETUP)
	$(PIP) -e ".[dev]"
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed-dev
	$(PIP) -e ".[test]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/bin/python $(SETUP)
	$(PIP) -e ".[docs]"
	touch $@

$(VENV)/.installed-compilers: $(VENV)/bin/python $(SETUP)
	$(PIP) -e ".[build,compilers]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-gpu $(DEMO)
