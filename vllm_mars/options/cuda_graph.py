"""Whether the output layer and the verification run in a CUDA graph on Model Runner V2."""

import os

GRAPH_VARIABLE = "VLLM_MARS_CUDA_GRAPH"


def graph_is_on() -> bool:
    """Whether the environment asks for it.

    Raises:
        ValueError: the environment variable has an unknown value.
    """
    given = os.environ.get(GRAPH_VARIABLE, "")
    if given not in ("", "0", "1"):
        raise ValueError(
            f"{GRAPH_VARIABLE}={given!r} is neither 1 (output layer and verification run in a CUDA "
            "graph) nor 0; unset it to launch them one by one."
        )
    return given == "1"
