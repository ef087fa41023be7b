# Neither run nor built: vLLM's image was not available. Linted, and checked by
# tests/test_deploy.py. From the repository's root:
#
#   docker build -f docs/deploy/cuda.Dockerfile -t vllm-mars:cuda .

# The newest release of setup.py's extra `cuda`.
ARG VLLM_VERSION=0.33.0
FROM vllm/vllm-openai:v${VLLM_VERSION}

WORKDIR /opt/vllm-mars
COPY setup.py pyproject.toml README.md LICENSE ./
COPY vllm_mars vllm_mars
COPY kernels kernels
# The vLLM of the image does not change: of the package's requirements only wrapt may be missing.
RUN uv pip install --system --no-cache .

WORKDIR /
# As in the image; arguments are those of `vllm serve`.
ENTRYPOINT ["vllm", "serve"]
