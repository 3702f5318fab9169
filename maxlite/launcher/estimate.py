"""`maxlite estimate` and `maxlite compile`: what a step will need, for people or as JSON, and the compiled step."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from maxlite.config.schema import Config
from maxlite.errors import ConfigError, OutOfMemoryError
from maxlite.estimate.compile import build_target
from maxlite.estimate.run import Estimate, ProgramReport, estimate_training, run_decode_estimate, run_estimate
from maxlite.parallel.topology import without_compile_cache
from maxlite.parallel.xla_flags import compiler_options
from maxlite.train.compiled_step import write_step

_GIB = 2**30
_WAYS = {"compute": "arithmetic", "memory": "memory", "links": "links in a slice", "network": "network of slices"}


def print_estimate(config: Config, json_output: bool, decode: bool = False) -> None:
    """Compiles the training step, or with `decode` prefill and a step of decoding, and prints what they need.

    Raises:
        ConfigError: before anything is compiled.
    """
    _show(run_decode_estimate(config) if decode else run_estimate(config), json_output)


def compile_step(config: Config, json_output: bool) -> None:
    """Compiles the training step, prints what it needs and writes it to compiled_trainstep_file.

    Raises:
        ConfigError: no file is named, or a key does not fit.
        OutOfMemoryError: the step does not fit, so that there is nothing to write.
    """
    path = config.compile.compiled_trainstep_file
    if path is None:
        raise ConfigError("compile writes a file; name it: compiled_trainstep_file=step.bin")
    target = build_target(config)
    # An executable that was read from the cache lacks parts of its code when it is written again, on CPUs at least.
    with without_compile_cache():
        estimate, setup, program = estimate_training(config, target)
    _show(estimate, json_output)
    if program.compiled is None:
        raise OutOfMemoryError(f"the compiled step does not fit, and {path} was not written.")
    options = compiler_options(config.compile, setup.devices[0].platform)
    size = write_step(path, program.lowered, program.compiled, setup.mesh, options)
    print(f"Wrote {path}: {size / 1e6:.1f} MB", file=sys.stderr if json_output else sys.stdout)


def _show(estimate: Estimate, json_output: bool) -> None:
    if json_output:
        print(json.dumps(_as_json(estimate)))
        return
    console = Console(highlight=False, soft_wrap=False)
    console.print(_headline(estimate))
    console.print(_memory_table(estimate))
    console.print(_verdict(estimate))
    for report in estimate.programs:
        _print_program(console, report, estimate)
    if estimate.zero:
        console.print(_zero_table(estimate))
    if estimate.fixes:
        console.print("\n".join(_fix_lines(estimate)), markup=False)


def _as_json(estimate: Estimate) -> dict[str, Any]:
    """Returns the estimate as one JSON object: bytes, FLOP and seconds of one device; what is not known is null."""
    programs = []
    for report in estimate.programs:
        row = dataclasses.asdict(report)
        if report.memory is not None:
            row["memory"]["peak"] = report.memory.peak
        if report.roofline is not None:
            row["roofline"] |= {"bound": report.roofline.bound, "serial": report.roofline.serial}
        row["needed"] = report.needed if math.isfinite(report.needed) else None
        programs.append(row)
    zero = [row._asdict() | {"total": row.total} for row in estimate.zero]
    return dataclasses.asdict(estimate) | {"fits": estimate.fits, "programs": programs, "zero": zero}


def _headline(estimate: Estimate) -> str:
    slices = f" in {estimate.num_slices} slices" if estimate.num_slices > 1 else ""
    return (
        f"[bold]{estimate.num_devices} x {estimate.device_kind}{slices}[/bold], mesh {estimate.mesh}: "
        f"{estimate.num_parameters:,} parameters, {estimate.tokens:,} tokens a step"
    )


def _memory_table(estimate: Estimate) -> Table:
    table = Table("memory of one device", title_justify="left", box=None, pad_edge=False)
    for report in estimate.programs:
        table.add_column(f"{report.name}, GiB", justify="right")
    rows: list[tuple[str, list[float | None]]] = [("parameters", [estimate.parameters] * len(estimate.programs))]
    if estimate.optimizer:
        rows.append(("optimizer", [estimate.optimizer]))
    if estimate.optimizer_on_host:
        rows.append(("optimizer, on the host", [estimate.optimizer_on_host]))
    if estimate.cache:
        rows.append(("cache", [estimate.cache] * len(estimate.programs)))
    state = estimate.parameters + estimate.optimizer
    memories = [report.memory for report in estimate.programs]
    rows += [
        ("batch and results", [m and max(m.arguments - state + m.results - estimate.cache, 0) for m in memories]),
        ("activations and gradients", [m and m.temporaries for m in memories]),
        ("program", [m and m.code for m in memories]),
        ("[bold]peak[/bold]", [report.needed for report in estimate.programs]),
    ]
    for name, values in rows:
        table.add_row(name, *(_gib(value) for value in values))
    return table


def _verdict(estimate: Estimate) -> str:
    if estimate.available is None:
        return "What a device has is not known."
    peak = max(report.needed for report in estimate.programs)
    share = f" ({peak / estimate.available:.0%})" if math.isfinite(peak) else ""
    word = "[green]fits[/green]" if estimate.fits else "[red]does not fit[/red]"
    return f"{word}: a device has {_gib(estimate.available)} GiB{share}"


def _print_program(console: Console, report: ProgramReport, estimate: Estimate) -> None:
    recomputed = report.flops / report.model_flops if report.model_flops else 1.0
    console.print(
        f"\n[bold]{report.name}[/bold], one device: {report.model_flops / 1e12:,.3g} TFLOP by the model, "
        f"{report.flops / 1e12:,.3g} computed (x {recomputed:.2f}); compiled in {report.compile_seconds:.0f} s"
    )
    if report.traffic:
        table = Table("collective", "mesh axes", box=None, pad_edge=False)
        for title in ("times", "GB", "GB sent", "way"):
            table.add_column(title, justify="left" if title == "way" else "right")
        for row in report.traffic:
            way = "between slices" if row.network else "in a slice"
            axes = " ".join(row.axes)
            table.add_row(row.kind, axes, f"{row.times:,}", _gb(row.payload), _gb(row.sent), way)
        console.print(table)
    elif report.memory is not None:
        console.print("no collectives")
    roofline = report.roofline
    if roofline is None:
        return
    parts = ", ".join(f"{_WAYS[name]} {_seconds(getattr(roofline, name))}" for name in _WAYS)
    mfu = f", MFU at most {report.mfu:.1%}" if report.mfu is not None else ""
    console.print(
        f"at best {_seconds(roofline.bound)} (limited by {_WAYS[roofline.limit]}){mfu}; without any overlap "
        f"{_seconds(roofline.serial)}: {parts}"
    )


def _zero_table(estimate: Estimate) -> Table:
    table = Table(f"state by {estimate.num_devices} devices", box=None, pad_edge=False, title=" ")
    for title in ("parameters, GB", "gradients, GB", "optimizer, GB", "all, GB"):
        table.add_column(title, justify="right")
    for row in estimate.zero:
        table.add_row(row.stage, *(_gb(part) for part in (row.parameters, row.gradients, row.optimizer, row.total)))
    return table


def _fix_lines(estimate: Estimate) -> Iterator[str]:
    """What a fix costs is known where the device's rates are."""
    yield "\nWhat helps, the cheapest first:"
    for number, fix in enumerate(estimate.fixes, 1):
        cost = "" if estimate.peak_tflops is None else f", costs about {_seconds(fix.seconds)} a step"
        enough = "; enough by itself" if fix.enough else ""
        yield f"  {number}. {fix.keys}: saves about {_gib(fix.saves)} GiB{cost} ({fix.note}){enough}"


def _gib(value: float | None) -> str:
    return "?" if value is None or not math.isfinite(value) else f"{value / _GIB:,.3g}"


def _gb(value: float) -> str:
    return f"{value / 1e9:,.3g}"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.3g} ms"
