"""What a run reports: FLOP counts, rates, log lines, TensorBoard and JSONL files, traces and warnings."""
