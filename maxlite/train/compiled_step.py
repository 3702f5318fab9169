"""A compiled step in a file, so that a run begins without compiling: written by `compile`, read by `train`.

A zip archive of two members: header.json says what the program is, program.bin is the executable as XLA writes it.
The trees of its arguments and results are not in it; they come from tracing the step again, which takes no time
beside compiling. An executable is machine code: load one only from where you would run a program from.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib.version

# jax has no public door to an executable that it did not compile itself, but the entries of its compile cache are
# such: here it is given a cache of one entry. Only resetting the cache is public; neither the form of an entry nor a
# cache other than a folder is.
from jax._src import compilation_cache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxlite.errors import ConfigError

_HEADER, _PROGRAM = "header.json", "program.bin"
_FORMAT = 2
# Of jax, while it reads from the cache of one entry.
_SETTINGS = ("jax_enable_compilation_cache", "jax_raise_persistent_cache_errors")
# What must be the same, and what to say of it.
_MEANINGS = {
    "format": "version of the file",
    "jax": "version of jax",
    "jaxlib": "version of jaxlib",
    "platform": "platform",
    "device_kind": "kind of device",
    "num_devices": "number of devices",
    "flags": "set of compiler flags",
    "program": "program (the config, or the code that made it)",
}


def write_step(
    path: str,
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    mesh: jax.sharding.Mesh,
    options: Mapping[str, Any],
) -> int:
    """Writes a compiled step; an existing file is replaced. Returns its size in bytes.

    options: flags of the compiler that it was compiled with, name -> value.

    Raises:
        ConfigError: the path can't be written.
    """
    executable = compiled.runtime_executable()
    assert executable is not None, "compiled for devices"
    program = executable.serialize()
    target = pathlib.Path(path).expanduser()
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr(_HEADER, json.dumps(_header(lowered, mesh, options)))
            archive.writestr(_PROGRAM, program)
        os.replace(part, target)
    except OSError as error:
        raise ConfigError(f"compiled_trainstep_file={path} can't be written: {error.strerror}.") from error
    return target.stat().st_size


def read_step(
    path: str, lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh, options: Mapping[str, Any]
) -> jax.stages.Compiled:
    """Returns the step in `path`, ready to run.

    lowered: the same step, traced here for this mesh, and not compiled in this process before.
    options: flags of the compiler that this run asks for, name -> value.

    Raises:
        ConfigError: there is no such file, or it is of another program, version, kind of device or set
            of flags.
    """
    try:
        with zipfile.ZipFile(pathlib.Path(path).expanduser()) as archive:
            header = json.loads(archive.read(_HEADER))
            program = archive.read(_PROGRAM)
    except FileNotFoundError as error:
        raise ConfigError(
            f"compiled_trainstep_file={path} does not exist; write it with the same config: maxlite compile ..."
        ) from error
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ConfigError(f"compiled_trainstep_file={path} is no compiled step: {error}.") from error
    _check(path, header, _header(lowered, mesh, options))
    with _cache_of(program) as cache:
        compiled = lowered.compile()
    assert cache.served == 1, "the file's program was not asked for"
    return compiled


def _header(lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh, options: Mapping[str, Any]) -> dict[str, Any]:
    devices: Sequence[jax.Device] = list(mesh.devices.flat)
    return {
        "format": _FORMAT,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        # They change the executable, and the traced program does not show them.
        "flags": " ".join(f"--{name}={json.dumps(options[name])}" for name in sorted(options)) or "none",
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }


def _check(path: str, header: dict[str, Any], here: dict[str, Any]) -> None:
    differing = [
        meaning if name == "program" else f"{meaning}: {header.get(name)} in the file, {here[name]} here"
        for name, meaning in _MEANINGS.items()
        if header.get(name) != here[name]
    ]
    if differing:
        raise ConfigError(
            f"compiled_trainstep_file={path} is of another {'; another '.join(differing)}. Compile it again with this "
            "config on this version, or leave the key away."
        )


class _OneEntry:
    """A compile cache that answers every question with the same program."""

    def __init__(self, program: bytes) -> None:
        timed = compilation_cache.combine_executable_and_time(program, 0)
        self.entry = compilation_cache.compress_executable(timed)
        self.served = 0
        # jax says in its log where a cache lay.
        self._path = _PROGRAM

    def get(self, key: str) -> bytes:
        """Returns the program, whatever the key: what it is has been checked by its header."""
        del key
        self.served += 1
        return self.entry


@contextlib.contextmanager
def _cache_of(program: bytes) -> Iterator[_OneEntry]:
    cache = _OneEntry(program)
    # jax declares its settings where a type checker does not see them.
    enabled, errors = (getattr(jax.config, name) for name in _SETTINGS)
    jax.config.update("jax_enable_compilation_cache", True)
    # jax looks at the setting once, and again after this.
    reset_cache()
    compilation_cache._cache = cache
    # An entry that can't be loaded is an error and no reason to compile.
    jax.config.update("jax_raise_persistent_cache_errors", True)
    try:
        yield cache
    finally:
        jax.config.update("jax_raise_persistent_cache_errors", errors)
        jax.config.update("jax_enable_compilation_cache", enabled)
        reset_cache()
