"""Inside vLLM's workers: the rejection samplers and what they verify with."""
