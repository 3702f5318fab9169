"""A picture of the errors of all layers."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxlite.quantize.layer_errors import LayerError

# Inches: of a bar, and of the picture at least and at most.
_BAR, _NARROWEST, _WIDEST, _HEIGHT = 0.25, 7.0, 30.0, 4.0
# There are ten colours; then the next mark.
_NUM_COLOURS, _MARKS = 10, "ox^s"


def plot_errors(errors: Sequence[LayerError], method: str, path: Path) -> str | None:
    """Draws a bar for each layer, its mean error, and on it a mark for each of its products.

    Returns: None, or without matplotlib a line that says how to get it.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return f'{path.name} was not drawn, for which matplotlib is needed: pip install "maxlite[plot]"'
    width = min(max(_NARROWEST, _BAR * len(_by_layer(errors)) + 2), _WIDEST)
    # Without pyplot, which keeps figures and asks for a display.
    figure = figures.Figure(figsize=(width, _HEIGHT), layout="constrained")
    _draw(figure.subplots(), errors, method)
    figure.savefig(path, dpi=150)
    return None


def _draw(axes: Any, errors: Sequence[LayerError], method: str) -> None:
    layers = _by_layer(errors)
    means = [100 * sum(error.size for error in of_layer) / len(of_layer) for of_layer in layers.values()]
    axes.bar(list(layers), means, color="lightgray", label="mean")
    for number, name in enumerate(dict.fromkeys(error.name for error in errors)):
        points = [(error.layer, 100 * error.size) for error in errors if error.name == name]
        mark = _MARKS[number // _NUM_COLOURS % len(_MARKS)]
        axes.plot(*zip(*points, strict=True), linestyle="none", marker=mark, markersize=4, label=name)
    measured = "output" if all(error.output is not None for error in errors) else "kernel"
    axes.set(title=f"{method}: error of each product", xlabel="layer", ylabel=f"relative error of the {measured}, %")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _by_layer(errors: Sequence[LayerError]) -> dict[int, list[LayerError]]:
    layers: dict[int, list[LayerError]] = {}
    for error in errors:
        layers.setdefault(error.layer, []).append(error)
    return layers
