"""What can go wrong for a user, each kind with its documented exit code.

A message says what was given, what is allowed and what to change. The command line prints it without a
traceback. A programmer's own broken invariant is an `assert`, never one of these.
"""


class MaxliteError(Exception):
    """Base of every error that a user can mend."""

    exit_code = 1


class ConfigError(MaxliteError, ValueError):
    """A key, a value or a combination of values that cannot be run."""

    exit_code = 2


class DataError(MaxliteError):
    """Training or evaluation data that cannot be read, or that holds nothing to train on."""

    exit_code = 3


class OutOfMemoryError(MaxliteError):
    """The devices or the host have too little memory for what was asked."""

    exit_code = 4


class NonFiniteLossError(MaxliteError):
    """The loss became NaN or infinite."""

    exit_code = 5


class CheckpointError(MaxliteError):
    """A run directory or checkpoint that cannot be read, written or used with this config."""

    exit_code = 6


class ConversionError(MaxliteError):
    """A Hugging Face folder that cannot be read, written or expressed: names the file, the tensor or the key."""

    exit_code = 7


class DistributedError(MaxliteError):
    """Processes of one run that did not find each other, that differ, or of which one was lost."""

    exit_code = 8


class HangError(MaxliteError):
    """No step ended for far longer than steps take."""

    exit_code = 9


class PreemptedError(MaxliteError):
    """The run was asked to stop; it saved, and the same command goes on from there (EX_TEMPFAIL)."""

    exit_code = 75
