"""What V1 emits for sampled requests, against the enumerated rule."""

import pytest
import torch
from vllm.platforms import current_platform

import enumerated
import test_sampler_v1
from vllm_mars import MarsConfig
from vllm_mars.runner.cpu_kernels import mend

COUNT = 20_000


@pytest.fixture(scope="module")
def _cpu_kernels():
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    mend()


@pytest.mark.usefixtures("_cpu_kernels")
@pytest.mark.parametrize("theta", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("with_draft_probs", [False, True])
def test_v1(with_draft_probs, top_k, theta):
    drafts = enumerated.drafts(COUNT, with_draft_probs)
    metadata = test_sampler_v1.metadata_of(drafts.tolist())
    metadata.draft_token_ids = drafts.flatten().int()
    torch.manual_seed(0)
    output = test_sampler_v1.mars_sampler(MarsConfig(theta=theta))(
        metadata,
        enumerated.DRAFT.float().repeat(COUNT, 1) if with_draft_probs else None,
        enumerated.LOGITS.repeat(COUNT, 1),
        test_sampler_v1.sampling(
            [1.0] * COUNT,
            drafts=drafts.tolist(),
            top_k=torch.full((COUNT,), top_k) if top_k else None,
        ),
    )
    samples = [
        tuple(token for token in row if token != -1) for row in output.sampled_token_ids.tolist()
    ]
    enumerated.check(samples, theta, with_draft_probs, top_k)
