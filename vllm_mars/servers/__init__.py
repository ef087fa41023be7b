"""vLLM server processes and the provenance of results."""
