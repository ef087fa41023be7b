"""The metrics of a sweep's cells: what its result files call the rules."""

from vllm_mars.config import OPTION_PREFIX

# Each with the rule that it is.
METRICS = {"ratio": "theta", "gap": "gap", "price": "price"}
OPTION = {metric: OPTION_PREFIX + rule for metric, rule in METRICS.items()}
