"""What runs on this machine: servers, models, drafts, prompts, where a result came from."""
