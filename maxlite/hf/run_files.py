"""The files of a Hugging Face model that a run keeps beside its checkpoints, so that it decodes and exports alone."""

import shutil
from pathlib import Path

from maxlite.checkpoint.step_folder import CHECKPOINTS
from maxlite.data.gguf_header import is_gguf, read_header
from maxlite.data.gguf_tokenizer import write_tokenizer
from maxlite.data.json_files import write_json
from maxlite.data.model_folder import ORIGINALS, has_tokenizer
from maxlite.errors import ConversionError
from maxlite.hf.folder import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, read_folder


def keep_files(source: Path, run: Path) -> None:
    """Copies tokenizer and JSON files from a Hugging Face folder, or from a run that has them, to a run.

    Of a GGUF file they are made.

    Raises:
        ConversionError: one can't be copied.
    """
    if is_gguf(source):
        folder = read_folder(source)
        (run / ORIGINALS).mkdir(exist_ok=True)
        write_json(run / ORIGINALS / CONFIG, folder.config)
        write_json(run / ORIGINALS / GENERATION_CONFIG, folder.generation_config)
        keep_tokenizer(source, run)
        return
    inner = source / ORIGINALS if (source / ORIGINALS).is_dir() else source
    try:
        for name in (CONFIG, GENERATION_CONFIG):
            if (inner / name).is_file():
                (run / ORIGINALS).mkdir(exist_ok=True)
                shutil.copyfile(inner / name, run / ORIGINALS / name)
    except OSError as error:
        raise ConversionError(f"{inner / name} can't be copied to {run}: {error.strerror}.") from error
    keep_tokenizer(source, run)


def keep_tokenizer(source: Path, destination: Path) -> None:
    """Copies the files that a tokenizer is made of, those that are there; of a GGUF file they are made.

    source: a folder, or a file of a tokenizer's.

    Raises:
        ConversionError: one can't be copied.
    """
    if is_gguf(source):
        if has_tokenizer(source):
            write_tokenizer(read_header(source), destination)
        return
    source = source.parent if source.is_file() else source
    for name in TOKENIZER_FILES:
        if not (source / name).is_file() or (source / name).resolve() == (destination / name).resolve():
            continue
        try:
            shutil.copyfile(source / name, destination / name)
        except OSError as error:
            raise ConversionError(f"{source / name} can't be copied to {destination}: {error.strerror}.") from error


def run_of(source: Path) -> Path:
    """Returns the run directory of a run directory or of RUN/checkpoints/<n>."""
    given = source.expanduser().absolute()
    return given.parents[1] if given.parent.name == CHECKPOINTS else given
