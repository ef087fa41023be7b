"""Conformance with an installed vLLM.

    pytest tests/conformance

in an environment with this package and the vLLM in question (its CPU build) says whether MARS, at
theta = 1 or price 0, answers exactly as that vLLM's own sampler does, and else exactly as the
rule says: through real engines with tiny random models and at the samplers themselves, on both
model runners. Nothing is downloaded but for one test with the packaged model.

    test_engine_v1.py, test_engine_v2.py    engines: one workload for vLLM's sampler and for MARS
    test_step_v2.py, test_slots_v2.py,      one verification step of V2 (that of V1 is in
    test_runner_v2.py                       tests/worker/test_sampler_v1.py), what is kept from step
                                            to step, and what surrounds one
    test_distribution.py,                   all that a step of V1, and of V2, can emit, against the
    test_distribution_v2.py                 rule (enumerated.py)
    test_grammar.py                         the same of drafts that a grammar forbids a part of, as
                                            vLLM's scheduler hands them on (scheduled.py)

Model Runner V2 needs Triton, so on a CPU it runs in Triton's interpreter (tests/interpreter.py).
"""

import pytest

import tiny_models


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders `target`, `draft` (a model of the target's first layer) and `eagle` (a head)."""
    directory = tmp_path_factory.mktemp("models")
    model = tiny_models.llama(directory / "target")
    tiny_models.eagle(directory / "eagle", model)
    tiny_models.first_layer(directory / "draft", model)
    return directory
