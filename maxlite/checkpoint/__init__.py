"""Run directories and their checkpoints: orbax, and nothing else that reads or writes training state."""
