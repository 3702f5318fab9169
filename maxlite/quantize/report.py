"""What quantization saved and what it cost: sizes, held-out text, and the layers that lost the most."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from maxlite.config.schema import Config
from maxlite.data.batch import Batch
from maxlite.model.build import Params
from maxlite.parallel.sharding import use_mesh
from maxlite.quantize.layer_errors import (
    LayerError,
    Squares,
    build_output_step,
    kernel_squares,
    layer_errors,
    stored_products,
)
from maxlite.quantize.measure import Side, TextReport, TextSums, build_text_step, on_host, text_report
from maxlite.quantize.plot import plot_errors
from maxlite.quantize.tree import at_path
from maxlite.train.eval_setup import EvalSetup


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a model's parameters in one form.

    num_bytes: of all. bits: a weight, over all weights. kernel_bits: a weight, over those that are rounded, scales
    counted.
    """

    num_bytes: int
    bits: float
    kernel_bits: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What `maxlite quantize` says of its result.

    method: as the key. before, after: of the float parameters and of the stored ones.
    text: None where nothing is held out. errors: of every rounded product, layer by layer. num_worst: products named.
    """

    method: str
    before: Size
    after: Size
    text: TextReport | None
    errors: tuple[LayerError, ...]
    num_worst: int

    @property
    def worst(self) -> list[LayerError]:
        """The products with the largest errors, the largest first."""
        return sorted(self.errors, key=lambda error: -error.size)[: self.num_worst]


def build_report(
    config: Config, setup: EvalSetup, whole: Side, stored: Side, batches: Iterable[Batch] | None
) -> Report:
    """Measures a model in few bits against the float model that it was rounded from.

    To be called outside of `use_mesh`.

    config: its eval_steps says how many batches are read, -1 for all. setup: of that config.
    whole: what was rounded; where something was folded into its kernels before that, with it.
    batches: held out, in numpy; None where nothing is.
    """
    sums, outputs = (None, None) if batches is None else _read(config, setup, whole, stored, batches)
    # Without a target there is nothing to say about text.
    text = None if sums is None or sums.targets == 0 else text_report(sums)
    kernels = on_host(kernel_squares(setup, whole, stored))
    return Report(
        method=config.quantize.method,
        before=_size(whole, stored),
        after=_size(stored, stored),
        text=text,
        errors=layer_errors(stored.model, kernels, None if text is None else outputs),
        num_worst=config.quantize.worst_layers,
    )


def report_text(report: Report) -> str:
    """Returns the report for people, in lines of at most 120 characters."""
    rows = [("", "before", "after"), *_size_rows(report), *_text_rows(report)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"Quantized by {report.method}"]
    lines += ["  ".join((name.ljust(widths[0]), a.rjust(widths[1]), b.rjust(widths[2]))) for name, a, b in rows]
    return "\n".join([*lines, *_text_lines(report), "", *_error_lines(report)])


def report_json(report: Report) -> dict[str, Any]:
    """Returns the report as JSON types; errors are relative, 0.01 for 1%."""
    text = report.text
    return {
        "method": report.method,
        "before": dataclasses.asdict(report.before),
        "after": dataclasses.asdict(report.after),
        "held_out": None
        if text is None
        else {
            "targets": text.targets,
            "perplexity_before": text.whole_perplexity,
            "perplexity_after": text.stored_perplexity,
            "kl_divergence_nats": text.divergence,
            "same_likeliest_token": text.agreement,
        },
        "worst": [_error_json(error) for error in report.worst],
        "layers": [_error_json(error) for error in report.errors],
    }


def write_report(report: Report, folder: Path, notes: TextIO) -> None:
    """Writes report.txt, report.json and, with matplotlib, report.png into `folder`, which is made.

    notes: where a line goes if there is no plot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(report_text(report) + "\n")
    (folder / "report.json").write_text(json.dumps(report_json(report), indent=1) + "\n")
    missing = plot_errors(report.errors, report.method, folder / "report.png")
    if missing is not None:
        print(missing, file=notes)


def _read(
    config: Config, setup: EvalSetup, whole: Side, stored: Side, batches: Iterable[Batch]
) -> tuple[TextSums, Squares]:
    """Sums over all batches, float64."""
    text_step = build_text_step(config, setup, whole.model, stored.model)
    output_step = build_output_step(setup, whole.model, stored.model)
    params: tuple[Params, Params] = whole.params, stored.params
    steps = config.train.eval_steps
    total: Any = None
    for batch in islice(batches, None if steps == -1 else steps):
        placed = setup.place(batch)
        with use_mesh(setup.mesh, setup.rules, config.compute.matmul_precision, setup.execution):
            sums = text_step(params, placed)
        found = on_host((sums, output_step(params, placed)))
        total = found if total is None else jax.tree.map(np.add, total, found)
    return (TextSums(0, 0, 0, 0, 0), {}) if total is None else total


def _size(side: Side, stored: Side) -> Size:
    """Of the parameters of `side`; which kernels are rounded, `stored` says."""
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(side.params))
    kernel_bytes = num_weights = 0
    for product in stored_products(stored.model):
        node = at_path(side.params, product.params_path)
        kept = [node[name] for name in ("kernel", "codes", "scale") if name in node]
        kernel_bytes += sum(array.size * array.dtype.itemsize for array in kept)
        num_weights += product.repeats * math.prod(product.shape)
    return Size(num_bytes, 8 * num_bytes / stored.model.num_parameters, 8 * kernel_bytes / num_weights)


def _size_rows(report: Report) -> Iterator[tuple[str, str, str]]:
    before, after = report.before, report.after
    yield "size in MB", f"{before.num_bytes / 1e6:,.3f}", f"{after.num_bytes / 1e6:,.3f}"
    yield "bits a weight", f"{before.bits:.2f}", f"{after.bits:.2f}"
    yield "bits a weight of the rounded kernels", f"{before.kernel_bits:.2f}", f"{after.kernel_bits:.2f}"


def _text_rows(report: Report) -> Iterator[tuple[str, str, str]]:
    if report.text is not None:
        yield "perplexity", f"{report.text.whole_perplexity:.4f}", f"{report.text.stored_perplexity:.4f}"


def _text_lines(report: Report) -> Iterator[str]:
    text = report.text
    if text is None:
        yield "Nothing is held out, so nothing is known of text: give eval_dataset_path= or eval_fraction above 0."
        return
    yield f"KL divergence from the float model: {text.divergence:.6f} nats a token"
    yield f"Both find the same token the likeliest: {text.agreement:.2%} of {text.targets:,} held-out targets"


def _error_lines(report: Report) -> Iterator[str]:
    worst = report.worst
    measured = "what they give for held-out text" if report.text is not None else "their kernels"
    yield f"The {len(worst)} worst of {len(report.errors)} products, by the relative error of {measured}:"
    rows = [("layer", "product", "output", "kernel")]
    rows += [(str(error.layer), error.name, _percent(error.output), _percent(error.kernel)) for error in worst]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for layer, name, output, kernel in rows:
        cells = layer.rjust(widths[0]), name.ljust(widths[1]), output.rjust(widths[2]), kernel.rjust(widths[3])
        yield "  ".join(cells)


def _error_json(error: LayerError) -> dict[str, Any]:
    return {"layer": error.layer, "path": error.path, "output_error": error.output, "kernel_error": error.kernel}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.3%}"
