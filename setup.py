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
RUNTIME = [
    "torch>=2.6",
    "megatron-core==0.19.2",
    "numpy",
    "psutil",
    "tensorboard",
]
PLANNER = ["networkx", "scipy", "pydantic>=2", "pyyaml", "rich", "matplotlib"]
TEST = ["pytest", "hypothesis"]
# Fused layers and FP8; found and used by Megatron itself.  Needs a CUDA tool chain to build.
GPU = ["transformer-engine[pytorch]>=2.3"]

setup(
    name="megatron-het",
    version=VERSION,
    description="Training large language models on mixed accelerators with Megatron-LM",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_het*", "tools*"]),
    package_data={"tools.planner": ["data/*"]},
    install_requires=RUNTIME,
    extras_require={"planner": PLANNER, "test": TEST, "gpu": GPU},
    entry_points={"console_scripts": ["het-plan = tools.planner.__main__:main"]},
)
