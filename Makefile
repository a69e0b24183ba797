# Every target sets up what it needs in .venv. PYTHON is the interpreter that makes it (3.11 or newer).
PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
export PATH := $(BIN):$(PATH)
# Two busy processes with several threads each slow one another down on a small machine.
export OMP_NUM_THREADS ?= 1
# Container images set it. Without bytecode, each of the hundreds of processes that tests start would compile the project.
unexport PYTHONDONTWRITEBYTECODE
CODE := certizoo zoo certify trainers tuning *.py benchmarks docs tests

.PHONY: install demo docs test test-slow test-attacks lint bench experiment ui clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'import certify.__main__, trainers.adv_train, tuning.driver'   # their bytecode, for shells that write none
	touch $@

# Digits of scikit-learn, 2 ranks on the CPU, certificates, a version in ./mlflow.db. Resumes where it stopped.
demo: install
	test -f data/digits/digits.json || certizoo shards digits data/digits
	deepspeed --num_gpus 2 trainers/adv_train.py +model=spec_vit_digits data=digits name=demo certify.workers=2 \
		certify.images=40 registry.champion_images=40 resume=auto
	certizoo registry list
	@echo 'rows, curve and model card: runs/demo/certificate/   browse the registry: make ui'

# The documentation site: build/site/index.html. Every warning of MkDocs is an error. The table of the zoo takes a minute and is
# cached until the code of zoo changes.
docs: install
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --quiet
	@echo 'the site: build/site/index.html'

# Two processes, each running whole files, so that a file's fixtures are set up once, in the order of tests/conftest.py. One
# folder: make test PKG=certify/stage
test: install
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow' tests/$(PKG)

test-slow: install
	python -m pytest -m slow tests/$(PKG)

# Hostile shards, hand-overs, run folders, caches, configs, tags and servers: docs/security.md
test-attacks: install
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m hostile tests/$(PKG)

lint: install
	ruff check $(CODE)
	ruff format --check $(CODE)
	@! grep -rnE '"""(Of|What|Whether|That|Where|Those|Who|How|Which) ' --include=*.py $(CODE) \
		|| { echo 'begin a docstring with a verb or a noun: CONTRIBUTING.md'; false; }
	codespell $(CODE) configs cluster *.md
	mypy

bench: install
	for file in benchmarks/bench_*.py; do python -m benchmarks.$$(basename $$file .py) || exit 1; done

# A table of a paper at reduced size: make experiment NAME=table2_deit_ti ARGS='data.root=FOLDER'
experiment: install
	python -m benchmarks.experiments $(NAME) $(ARGS)

ui: install
	certizoo registry ui

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
