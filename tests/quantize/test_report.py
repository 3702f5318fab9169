"""The report of a quantization: sizes by hand, its three files, and what it says without text."""

import importlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from maxlite.launcher.resolve import from_run, resolve_config
from maxlite.quantize.report import build_report, report_json, report_text, write_report
from maxlite.quantize.run import run_quantize
from maxlite.train.evaluation_run import run_evaluation
from tests.quantize.two_models import batch_of, float_kernel, node_of, two_models
from tests.reference import STORIES

INT4 = ("weight_quantization=int4", "weight_quant_tile_size=32")
INT8 = ("weight_quantization=int8", "num_decoder_layers=1")


@pytest.fixture(scope="module")
def made():
    """The report of a tiny model in int4 by two of three batches."""
    config, setup, whole, stored = two_models(*INT4, "eval_steps=2", "worst_layers=3", "method=int4")
    return build_report(config, setup, whole, stored, iter([batch_of(0), batch_of(1), batch_of(2)]))


def test_sizes_are_those_of_the_arrays(made):
    # Of 2 layers: query and out 64x64, key and value 64x32, gate, up and down 64x96.
    kernels = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    others = 72 * 64 + 5 * 64
    assert made.before.num_bytes == 4 * (kernels + others)
    # Half a byte, and 4 bytes for 32.
    stored = kernels // 2 + kernels // 32 * 4
    assert made.after.num_bytes == stored + 4 * others
    assert made.before.bits == made.before.kernel_bits == 32
    assert made.after.kernel_bits == 5
    assert made.after.bits == pytest.approx(8 * made.after.num_bytes / (kernels + others))


def test_it_reads_as_many_batches_as_the_config_says_and_names_the_worst(made):
    assert made.text is not None
    assert made.text.targets == sum(batch_of(seed).loss_mask.sum() for seed in (0, 1))
    assert made.text.divergence > 0 and made.text.stored_perplexity != made.text.whole_perplexity
    assert len(made.errors) == 14 and len(made.worst) == 3
    assert min(error.output for error in made.worst) >= sorted(error.output for error in made.errors)[-3]
    assert made.worst == sorted(made.worst, key=lambda error: -error.output)


def test_text_and_json_say_the_same(made):
    text, values = report_text(made), report_json(made)
    lines = text.splitlines()
    assert lines[0] == "Quantized by int4" and max(map(len, lines)) <= 120
    held_out = values["held_out"]
    assert f"{held_out['perplexity_before']:.4f}" in text and f"{held_out['perplexity_after']:.4f}" in text
    assert f"{held_out['kl_divergence_nats']:.6f} nats" in text
    assert f"{held_out['targets']:,} held-out targets" in text
    assert "The 3 worst of 14 products" in text
    table = [line.split() for line in lines[-3:]]
    for row, worst in zip(table, values["worst"], strict=True):
        name = worst["path"].removeprefix("group_0/block_0/")
        assert row == [str(worst["layer"]), name, f"{worst['output_error']:.3%}", f"{worst['kernel_error']:.3%}"]
    assert {(row["layer"], row["path"]) for row in values["layers"]} == {(e.layer, e.path) for e in made.errors}
    assert values["after"]["kernel_bits"] == 5


def test_three_files_are_written(made, tmp_path):
    notes = io.StringIO()
    write_report(made, tmp_path / "run" / "quantization", notes)
    folder = tmp_path / "run" / "quantization"
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "report.png", "report.txt"]
    assert (folder / "report.txt").read_text() == report_text(made) + "\n"
    assert json.loads((folder / "report.json").read_text()) == report_json(made)
    with Image.open(folder / "report.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    # Bars in light gray, marks in seven colours, on white.
    colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    found = {tuple(colour): count for colour, count in zip(colours.tolist(), counts.tolist(), strict=True)}
    assert found[211, 211, 211] > 10_000 and found[255, 255, 255] > 100_000 and found[31, 119, 180] > 20
    assert notes.getvalue() == ""


def test_without_matplotlib_a_line_says_how_to_get_it(made, tmp_path, monkeypatch):
    real = importlib.import_module

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    notes = io.StringIO()
    write_report(made, tmp_path, notes)
    assert 'pip install "maxlite[plot]"' in notes.getvalue()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.txt"]


def test_without_held_out_text_it_says_so_and_ranks_kernels():
    config, setup, whole, stored = two_models(*INT8)
    nothing = batch_of(0)._replace(loss_mask=np.zeros_like(batch_of(0).loss_mask))
    for batches in (None, [], [nothing]):
        report = build_report(config, setup, whole, stored, batches)
        assert report.text is None and report_json(report)["held_out"] is None
        assert all(error.output is None and error.kernel > 0 for error in report.errors)
        text = report_text(report)
        assert "Nothing is held out" in text and "by the relative error of their kernels" in text


def test_a_model_of_equal_function_costs_nothing():
    """Kernels whose elements are levels already."""
    config, setup, whole, stored = two_models(*INT8)
    exact = exact_side(whole, stored)
    report = build_report(config, setup, exact, stored, [batch_of(0)])
    assert report.text is not None
    assert report.text.divergence == pytest.approx(0, abs=1e-6) and report.text.agreement == 1
    assert report.text.stored_perplexity == pytest.approx(report.text.whole_perplexity, rel=1e-5)
    assert max(error.size for error in report.errors) == 0


def test_the_perplexities_of_a_run_are_those_of_the_eval_command(tmp_path):
    texts = [row["greedy_text"] for row in json.loads((STORIES / "golden_generation.json").read_text())]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    keys = [f"eval_dataset_path={text}", f"dataset_path={text}", "dataset_type=jsonl", "max_target_length=128"]
    keys += ["per_device_batch_size=2", "cpu_devices=1", "jax_cache_dir=null"]
    made, notes = tmp_path / "made", io.StringIO()
    config = resolve_config(str(STORIES), [*keys, "method=int4", "weight_quant_tile_size=16"])
    report = run_quantize(config, str(STORIES), made, notes)
    assert report.text is not None and report_text(report) in notes.getvalue()
    assert json.loads((made / "quantization" / "report.json").read_text()) == report_json(report)
    for source, found in ((STORIES, report.text.whole_perplexity), (made, report.text.stored_perplexity)):
        tags = run_evaluation(resolve_config(*from_run(str(source), keys)), str(source), notes)
        assert found == pytest.approx(tags["eval/avg_perplexity"], rel=1e-6)
        assert report.text.targets == tags["eval/total_weights"]
    # It was trained on stories, which it tells well; and four bits cost something.
    assert 2 < report.text.whole_perplexity < 2.3 and 0.001 < report.text.divergence < 0.5


def exact_side(whole, stored):
    """The float model of the kernels that the stored one has."""
    params = jax.tree.map(lambda leaf: leaf, whole.params)
    for product in stored.model.products:
        node, own = node_of(stored.params, product.params_path), node_of(params, product.params_path)
        dims = tuple(dim + 1 for dim in product.summed_dims)
        own["kernel"] = float_kernel(node["codes"], node["scale"], dims, "int8", jnp.dtype("float32"))
    return whole._replace(params=params)
