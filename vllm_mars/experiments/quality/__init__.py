"""What relaxed answers lose: scores beside the autoregressive answers, and paired intervals."""
