"""Where MARS enters vLLM."""
