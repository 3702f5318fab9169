"""Data: documents found, cut into windows, packed into rows, batched; its position can be saved exactly."""
