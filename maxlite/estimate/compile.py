"""Traces and compiles the programs of a config for devices that may not be here; nothing runs."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from maxlite.config.schema import Config
from maxlite.metrics.out_of_memory import is_out_of_memory
from maxlite.parallel.devices import prepare_jax, run_devices
from maxlite.parallel.sharding import use_mesh
from maxlite.parallel.topology import Topology, build_topology, without_compile_cache
from maxlite.processes.group import require_one_process
from maxlite.train.setup import Setup, build_setup


@dataclasses.dataclass(frozen=True)
class Target:
    """What is compiled for. topology: None where it is the devices of this machine."""

    devices: Sequence[jax.Device]
    topology: Topology | None


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program, compiled. compiled: None where the compiler says that it does not fit, and `refusal` says so."""

    name: str
    jaxpr: Any
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled | None
    refusal: str
    seconds: float


def build_target(config: Config) -> Target:
    """Returns the slices of compile_topology, or this machine's devices where it is not set.

    Raises:
        ConfigError: an unknown topology, or libtpu is missing.
    """
    section = config.compile
    if section.compile_topology is None:
        prepare_jax(config)
        require_one_process("estimate")
        return Target(run_devices(config.run), None)
    topology = build_topology(section.compile_topology, section.compile_topology_num_slices)
    return Target(topology.devices, topology)


def compile_train_step(config: Config, target: Target) -> tuple[Setup, CompiledProgram]:
    """Compiles the training step.

    Raises:
        ConfigError: as build_setup; nothing was compiled then.
    """
    setup = build_setup(config, devices=target.devices)
    with use_mesh(setup.mesh, setup.rules, config.compute.matmul_precision, setup.execution):
        traced = setup.train_step.trace(setup.abstract, setup.abstract_batch)
        return setup, compile_traced("train_step", traced, target)


def compile_traced(
    name: str, traced: jax.stages.Traced, target: Target, options: Mapping[str, str | bool] | None = None
) -> CompiledProgram:
    """Lowers and compiles; memory that does not suffice is a result, any other failure an error.

    options: of the compiler, beside those that the traced program has.
    """
    began = time.perf_counter()
    lowered = traced.lower()
    compiled, refusal = None, ""
    cache = contextlib.nullcontext() if target.topology is None else without_compile_cache()
    try:
        with cache:
            compiled = lowered.compile(dict(options) if options else None)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(str(error)):
            raise
        refusal = str(error)
    return CompiledProgram(name, traced.jaxpr, lowered, compiled, refusal, time.perf_counter() - began)
