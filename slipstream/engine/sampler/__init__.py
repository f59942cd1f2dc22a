"""From logits to tokens: logits processing, the coupled choice, draft distributions, log-probabilities."""
