"""The estimate: what a config's programs need and how fast they can be at best, from the real compiler."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax

from maxlite.config.schema import Config
from maxlite.estimate.arithmetic import program_flops
from maxlite.estimate.compile import CompiledProgram, Target, build_target, compile_train_step
from maxlite.estimate.decode import DecodeWork, compile_decode
from maxlite.estimate.fixes import Fix, Need, cheapest_fixes
from maxlite.estimate.groups import layout_of
from maxlite.estimate.hlo import Collective, Program
from maxlite.estimate.memory import ProgramMemory, bytes_needed, program_memory, whole_state
from maxlite.estimate.roofline import Rates, Roofline, build_roofline, crosses_slices, mfu_bound
from maxlite.estimate.zero import ZeroRow, zero_table
from maxlite.metrics.peak import peak_tflops
from maxlite.parallel.devices import device_memory_bytes
from maxlite.parallel.topology import device_spec
from maxlite.train.setup import Setup, describe_mesh
from maxlite.train.state import device_bytes, host_bytes


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind along the same mesh axes, in one call of the program.

    times: how often one of them runs. payload: bytes of the whole buffers; sent: bytes that a device sends.
    network: whether they go between slices.
    """

    kind: str
    axes: tuple[str, ...]
    times: int
    payload: int
    sent: int
    network: bool


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One program, per device.

    memory: None where it does not fit. needed: bytes at the worst moment. model_flops, flops: what the model needs
    and what the program computes. roofline: None where the device's rates are not known or the program does not fit.
    mfu: at the roofline's bound; None without it.
    """

    name: str
    memory: ProgramMemory | None
    needed: float
    model_flops: float
    flops: float
    traffic: tuple[Traffic, ...]
    roofline: Roofline | None
    mfu: float | None
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """parameters, gradients, optimizer, optimizer_on_host, cache, available: bytes on a device.

    cache: of decoding. available: None if unknown.
    """

    device_kind: str
    num_devices: int
    num_slices: int
    mesh: str
    num_parameters: int
    tokens: int
    parameters: int
    gradients: int
    optimizer: int
    optimizer_on_host: int
    cache: int
    available: float | None
    peak_tflops: float | None
    programs: tuple[ProgramReport, ...]
    zero: tuple[ZeroRow, ...]
    fixes: tuple[Fix, ...]

    @property
    def fits(self) -> bool | None:
        """Whether every program fits; None where the memory is not known."""
        if self.available is None:
            return None
        return all(report.memory is not None and report.needed <= self.available for report in self.programs)


def run_estimate(config: Config) -> Estimate:
    """Estimates the training step.

    Raises:
        ConfigError: before anything is compiled.
    """
    return estimate_training(config, build_target(config))[0]


def estimate_training(config: Config, target: Target) -> tuple[Estimate, Setup, CompiledProgram]:
    """Compiles the training step; returns it with its estimate."""
    setup, program = compile_train_step(config, target)
    rates = _rates(config, target, setup.model.compute.dtype)
    model_flops = setup.work.step_flops / len(setup.devices)
    devices = list(setup.mesh.devices.flat)
    available = _available(target)
    report = describe_program(program, setup.mesh, model_flops, rates)
    fixes: list[Fix] = []
    if available is not None and (report.memory is None or report.needed > available):
        fixes = cheapest_fixes(config, setup, _need(setup, report, available, rates))
    state = setup.abstract
    estimate = Estimate(
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        num_slices=1 if target.topology is None else target.topology.num_slices,
        mesh=describe_mesh(setup.mesh),
        num_parameters=setup.model.num_parameters,
        tokens=setup.work.padded_tokens,
        parameters=device_bytes(state.params),
        gradients=device_bytes(setup.abstract_gradients),
        optimizer=device_bytes(state.opt_state),
        optimizer_on_host=host_bytes(state.opt_state),
        cache=0,
        available=available,
        peak_tflops=None if rates is None else rates.flops / 1e12,
        programs=(report,),
        zero=tuple(zero_table(whole_state(state, setup.abstract_gradients), len(devices))),
        fixes=tuple(fixes),
    )
    return estimate, setup, program


def run_decode_estimate(config: Config) -> Estimate:
    """Estimates prefill and one step of decoding, against a cache of max_target_length tokens a row.

    Raises:
        ConfigError: before anything is compiled.
    """
    target = build_target(config)
    work = compile_decode(config, target)
    rates = _rates(config, target, work.model.compute.dtype)
    programs = tuple(
        describe_program(program, work.mesh, _decode_flops(work, tokens) / work.mesh.size, rates)
        for program, tokens in ((work.prefill, work.prompt_tokens), (work.step, work.rows))
    )
    parameters = device_bytes(work.params)
    return Estimate(
        device_kind=target.devices[0].device_kind,
        num_devices=work.mesh.size,
        num_slices=1 if target.topology is None else target.topology.num_slices,
        mesh=describe_mesh(work.mesh),
        num_parameters=work.model.num_parameters,
        tokens=work.rows,
        parameters=parameters,
        gradients=0,
        optimizer=0,
        optimizer_on_host=0,
        cache=work.cache,
        available=_available(target),
        peak_tflops=None if rates is None else rates.flops / 1e12,
        programs=programs,
        zero=(),
        fixes=(),
    )


def describe_program(
    program: CompiledProgram, mesh: jax.sharding.Mesh, model_flops: float, rates: Rates | None
) -> ProgramReport:
    """Reads a compiled program. model_flops: of one device."""
    devices = list(mesh.devices.flat)
    # Kernels count by their authors' estimates or by their grids, and calls into libraries show no arithmetic at all,
    # so the model's own is the least.
    flops = max(program_flops(program.jaxpr, devices[0].platform) / mesh.size, model_flops)
    if program.compiled is None:
        needed = bytes_needed(program.refusal) or math.inf
        collectives: list[Collective] = []
        memory = roofline = None
    else:
        memory = program_memory(program.compiled)
        needed = memory.peak
        collectives = Program(program.compiled.as_text() or "").collectives(layout_of(mesh))
        roofline = rates and build_roofline(flops, _moved(memory, collectives), collectives, devices, rates)
    return ProgramReport(
        name=program.name,
        memory=memory,
        needed=needed,
        model_flops=model_flops,
        flops=flops,
        traffic=tuple(_traffic_table(collectives, devices)),
        roofline=roofline,
        mfu=None if roofline is None or rates is None else mfu_bound(model_flops, roofline.bound, rates),
        compile_seconds=program.seconds,
    )


def _traffic_table(collectives: Iterable[Collective], devices: Sequence[jax.Device]) -> list[Traffic]:
    """Sums collectives by kind, axes and way, those that send most first."""
    sums: dict[tuple[str, tuple[str, ...], bool], list[int]] = {}
    for collective in collectives:
        key = (collective.kind, collective.axes, crosses_slices(collective, devices))
        total = sums.setdefault(key, [0, 0, 0])
        total[0] += collective.times
        total[1] += collective.times * collective.payload
        total[2] += collective.times * collective.sent
    rows = [
        Traffic(kind, axes, times, payload, sent, network)
        for (kind, axes, network), (times, payload, sent) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.sent)


def _moved(memory: ProgramMemory, collectives: Sequence[Collective]) -> float:
    """Bytes that go through a device's memory, at least: all that comes in is read, all that is made is written once
    and read once, what is gathered in every layer too."""
    gathered = sum(collective.times * collective.payload for collective in collectives)
    return 2 * memory.arguments + memory.results + 2 * memory.temporaries + 2 * gathered


def _rates(config: Config, target: Target, dtype: str) -> Rates | None:
    device = target.devices[0]
    spec = device_spec(device.device_kind)
    if spec is None:
        return None
    peak = peak_tflops(config.metrics.peak_tflops_per_device, device, dtype)
    wraps = () if target.topology is None else target.topology.wraps
    return None if peak is None else Rates(peak * 1e12, spec, wraps)


def _available(target: Target) -> float | None:
    spec = device_spec(target.devices[0].device_kind)
    return device_memory_bytes(list(target.devices)) if spec is None else spec.memory_bytes


def _need(setup: Setup, report: ProgramReport, available: float, rates: Rates | None) -> Need:
    arguments = device_bytes(setup.abstract) if report.memory is None else report.memory.arguments
    temporaries = report.needed - arguments if report.memory is None else report.memory.temporaries
    itemsize = 4 if setup.model.compute.dtype == "float32" else 2
    compute = gather = 0.0
    if rates is not None:
        compute = report.flops / rates.flops
        links = 2 * max(len(rates.wraps), 1) * rates.spec.link_bandwidth
        gather = setup.model.num_parameters * itemsize / links
    return Need(report.needed, available, temporaries, compute, gather)


def _decode_flops(work: DecodeWork, tokens: int) -> int:
    """Two FLOP a weight and token; what attention adds depends on the length and is in the program's own count."""
    return 2 * work.model.num_active_parameters * tokens
