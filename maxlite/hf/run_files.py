"""The files of a Hugging Face model that a run keeps beside its checkpoints, so that it decodes and exports alone."""

import dataclasses
import os
import shutil
from pathlib import Path

from maxlite.checkpoint.names import CHECKPOINTS
from maxlite.config.schema import Config
from maxlite.data.gguf_header import is_gguf
from maxlite.data.json_files import write_json
from maxlite.data.model_folder import ORIGINALS, TOKENIZER_FILE, has_tokenizer, tokenizer_file
from maxlite.data.tokenizer_formats import JSON, tokenizer_format, write_tokenizer
from maxlite.errors import ConversionError
from maxlite.hf.folder import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, read_folder
from maxlite.hf.peft_json import ADAPTER_CONFIG


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
        for name in (CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG):
            if (inner / name).is_file():
                (run / ORIGINALS).mkdir(exist_ok=True)
                shutil.copyfile(inner / name, run / ORIGINALS / name)
    except OSError as error:
        raise ConversionError(f"{inner / name} can't be copied to {run}: {error.strerror}.") from error
    keep_tokenizer(source, run)


def keep_adapter_config(folder: Path, run: Path) -> None:
    """Copies what a folder of adapters says, so that they can be written for the same model again.

    Raises:
        ConversionError: it can't be copied.
    """
    (run / ORIGINALS).mkdir(exist_ok=True)
    _copy(folder / ADAPTER_CONFIG, run / ORIGINALS / ADAPTER_CONFIG)


def keep_tokenizer(source: Path, destination: Path) -> None:
    """Copies the files that a tokenizer is made of, those that are there.

    Of a tokenizer of another format than tokenizer.json such a file is made as well, so that every program opens it.

    source: a folder, or a file of a tokenizer's.

    Raises:
        ConversionError: one can't be copied or written.
        ConfigError: the tokenizer can't be read.
    """
    if is_gguf(source) and not has_tokenizer(source):
        return
    file = tokenizer_file(source)
    made = file is not None and tokenizer_format(file) != JSON
    if not is_gguf(source):
        folder = source.parent if source.is_file() else source
        for name in {*TOKENIZER_FILES} - {TOKENIZER_FILE}:
            _copy(folder / name, destination / name)
        if file is not None:
            _copy(file, destination / (file.name if made else TOKENIZER_FILE))
    if file is not None and made:
        try:
            write_tokenizer(file, destination)
        except OSError as error:
            raise ConversionError(f"The tokenizer of {file} can't be written to {destination}: {error}.") from error


def _copy(file: Path, kept: Path) -> None:
    if not file.is_file() or file.resolve() == kept.resolve():
        return
    try:
        shutil.copyfile(file, kept)
    except OSError as error:
        raise ConversionError(f"{file} can't be copied to {kept.parent}: {error.strerror}.") from error


def run_of(source: Path) -> Path:
    """Returns the run directory of a run directory or of RUN/checkpoints/<n>."""
    given = source.expanduser().absolute()
    return given.parents[1] if given.parent.name == CHECKPOINTS else given


def config_of_run(config: Config, destination: Path, model: str | None = None) -> Config:
    """Returns what the config.yml of a run made by a conversion says: itself in place of what it came from.

    model: the name that the architecture goes by from now on; None leaves it as it is.
    """
    given = Path(os.path.abspath(destination.expanduser()))
    run = dataclasses.replace(config.run, run_name=given.name, base_output_directory=str(given.parent))
    run = run if model is None else dataclasses.replace(run, model=model)
    tokenizer = None if config.data.tokenizer_path is None else str(given)
    return dataclasses.replace(
        config,
        run=run,
        checkpoint=dataclasses.replace(config.checkpoint, load_hf=None, load_parameters_path=None),
        data=dataclasses.replace(config.data, tokenizer_path=tokenizer),
    )
