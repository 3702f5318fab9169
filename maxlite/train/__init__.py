"""Training: optimizer, state, the compiled step, evaluation and the loop."""
