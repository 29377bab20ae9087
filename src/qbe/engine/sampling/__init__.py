"""From logits to tokens: sampling, logprobs, constraints, scoring."""
