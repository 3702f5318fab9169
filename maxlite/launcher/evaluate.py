"""What the `eval` command prints."""

import json
import sys

from maxlite.config.schema import Config
from maxlite.decode.run import parameters_path
from maxlite.metrics.log_line import eval_numbers
from maxlite.train.evaluation_run import run_evaluation


def print_evaluation(config: Config, source: str, *, json_output: bool) -> None:
    """Prints the loss over what is held out: a line, or one JSON object of tags.

    source: a run directory, a Hugging Face folder, or the YAML file of a config that says where parameters are.

    Raises:
        ConfigError: no parameters are given, or a key does not fit.
        DataError, CheckpointError, ConversionError, OutOfMemoryError: as run_evaluation.
    """
    parameters = parameters_path(config, source)
    tags = run_evaluation(config, parameters, sys.stderr if json_output else sys.stdout)
    if json_output:
        print(json.dumps({"parameters": parameters, **tags}))
    else:
        print(f"Evaluated {parameters}: {eval_numbers(tags)}")
