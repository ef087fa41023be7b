"""Inside vLLM's front end and engine core: options, what is carried between processes, metrics."""
