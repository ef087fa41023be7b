"""Verifies a step with torch only: the accepted draft tokens at two prices.

pip install torch . && python examples/verify_greedy.py
"""

import torch

from vllm_mars import verify_greedy

# One request, a vocabulary of 4, a draft of two tokens: a row of logits for each, and a bonus row.
logits = torch.tensor([[2.0, 1.8, 0.0, 0.0], [0.0, 3.0, 1.0, 0.0], [0.0, 0.0, 4.0, 0.0]])
draft = torch.tensor([1, 1])
ends = torch.tensor([2], dtype=torch.int32)
for price in (0.0, 0.3):
    output = verify_greedy(logits, draft, ends, price=price)
    print(price, output.output_token_ids.tolist())
