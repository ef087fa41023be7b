"""Where MARS enters vLLM, and what it knows of vLLM's releases."""
