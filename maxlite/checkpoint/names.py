"""What the parts of a run's checkpoints are called."""

CHECKPOINTS = "checkpoints"
# In the run's folder, where its checkpoints lie elsewhere: the path or URL of their folder.
ELSEWHERE = "checkpoints.txt"
# In a step's folder: arrays, data position, and what both must be.
ITEMS = "items"
DATA_STATE = "iter"
FILES = "files.json"
