"""Conformance with an installed vLLM: `pytest tests/conformance`.

At theta 1 or price 0, MARS must answer exactly as vLLM's sampler, and otherwise as the rule says.
Real engines run tiny random models on both model runners; nothing is downloaded except for one test
with the packaged model.

    test_engine_v1.py, test_engine_v2.py    engines: one workload for vLLM's sampler and for MARS
    test_step_v2.py, test_slots_v2.py,      a verification step of V2 (for V1 see
    test_runner_v2.py                       tests/worker/test_sampler_v1.py), state between steps,
                                            and the runner
    test_distribution.py,                   everything that a step of V1 and V2 can emit, against
    test_distribution_v2.py                 the rule (enumerated.py)
    test_grammar.py                         the same for drafts that a grammar partly forbids
                                            (scheduled.py)

Model Runner V2 needs Triton, so on a CPU it runs in Triton's interpreter (tests/interpreter.py).
"""

import pytest

import tiny_models


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders `target`, `draft` (the target's first layer) and `eagle` (a head)."""
    directory = tmp_path_factory.mktemp("models")
    model = tiny_models.llama(directory / "target")
    tiny_models.eagle(directory / "eagle", model)
    tiny_models.first_layer(directory / "draft", model)
    return directory
