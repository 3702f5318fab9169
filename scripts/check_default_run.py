"""Checks a finished default run: held-out loss below 2.0 nats a byte, and below the first loss by more than 3."""

import json
import pathlib
import sys

rows = [json.loads(line) for line in (pathlib.Path(sys.argv[1]) / "metrics" / "metrics.jsonl").open()]
first = next(row["learning/loss"] for row in rows if "learning/loss" in row)
held_out = [row["eval/avg_loss"] for row in rows if "eval/avg_loss" in row][-1]
print(f"first loss {first:.3f}, held-out loss {held_out:.3f}")
sys.exit(0 if held_out < 2.0 and first - held_out > 3.0 else "the default run did not learn what it should")
