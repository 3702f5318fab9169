"""The quantize command: a float model becomes a run with kernels in few bits, and a report says what that costs."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import jax

from maxlite.checkpoint.tree import leaf_paths
from maxlite.config.check_quant import QUANT_CHECKS
from maxlite.config.load import dump_config, dump_model
from maxlite.config.schema import Config
from maxlite.data.batch import Batch
from maxlite.data.pipeline import Dataset
from maxlite.decode.run import parameters_path
from maxlite.errors import ConfigError
from maxlite.hf.convert import save_parameters
from maxlite.hf.equip_load import Intake
from maxlite.hf.load import load_parameters
from maxlite.hf.run_files import config_of_run, keep_files, keep_tokenizer, run_of
from maxlite.hf.writer import check_new, new_folder
from maxlite.model.build import Model, Params, build_model
from maxlite.model.equip import describe_equipment
from maxlite.parallel.devices import prepare_jax
from maxlite.parallel.sharding import use_mesh
from maxlite.processes.group import require_one_process
from maxlite.quantize.awq import fold_input_scales
from maxlite.quantize.calibrate import calibration_batches
from maxlite.quantize.gptq import quantize_gptq
from maxlite.quantize.measure import Side
from maxlite.quantize.report import Report, build_report, report_text, write_report
from maxlite.train.eval_setup import EvalSetup, build_eval_setup, open_data
from maxlite.train.evaluation_run import with_held_out_alone
from maxlite.train.memory_errors import memory_advice

# Methods that look at text, and what they store.
_CALIBRATED = {"gptq": "int4", "awq": "int4"}
REPORT_FOLDER = "quantization"


def run_quantize(config: Config, source: str, destination: Path, notes: TextIO) -> Report:
    """Makes the run `destination`, whole or not at all, of the parameters of `source`.

    config: of the float model; method and the weight_quant keys say what to make of it.
    source: a run, its checkpoint, a Hugging Face folder, or the YAML file of a config that says where parameters are.

    Raises:
        ConfigError: the model is quantized already or has adapters, or a pattern matches none of its products.
        DataError: there is no text to look at.
        CheckpointError, ConversionError, OutOfMemoryError: as in evaluation; or the destination exists.
    """
    check_new(destination)
    whole_config, stored_config = _float_config(config), _stored_config(config)
    path = parameters_path(config, source)
    prepare_jax(config)
    require_one_process("quantize")
    with memory_advice(config), new_folder(destination) as unfinished:
        setup = build_eval_setup(whole_config)
        stored_model = build_model(config.model, stored_config.compute, setup.devices[0].platform)
        print("\n".join(describe_equipment(stored_model.products)), file=notes)
        with use_mesh(setup.mesh, setup.rules, config.compute.matmul_precision, setup.execution):
            dataset = open_data(whole_config, setup)
            print(dataset.summary, file=notes)
            shardings = setup.model.shardings(setup.mesh, setup.rules)
            whole = Side(setup.model, load_parameters(path, setup.model, shardings, notes))
            whole, stored = _quantized(whole_config, setup, whole, stored_model, dataset, notes)
        held_out: Iterable[Batch] | None = None if dataset.eval_batches is None else dataset.eval_batches()
        report = build_report(config, setup, whole, stored, held_out)
        print(report_text(report), file=notes)
        write_report(report, unfinished / REPORT_FOLDER, notes)
        _write_run(stored_config, stored.params, Path(path), unfinished, destination)
    return report


def _quantized(
    config: Config, setup: EvalSetup, whole: Side, stored_model: Model, dataset: Dataset, notes: TextIO
) -> tuple[Side, Side]:
    """The float model, with what was folded into its kernels, and the stored one."""
    method = config.quantize.method
    batches = calibration_batches(config, setup, dataset) if method in _CALIBRATED else []
    if method == "awq":
        whole = Side(whole.model, fold_input_scales(whole, stored_model, batches, notes))
    shardings = stored_model.shardings(setup.mesh, setup.rules)
    stored = Side(stored_model, round_to_nearest(stored_model, shardings, whole.params))
    if method == "gptq":
        stored = Side(stored_model, quantize_gptq(whole, stored, batches, notes))
    return whole, stored


def round_to_nearest(model: Model, shardings: Params, params: Params) -> Params:
    """Returns the parameters of a model that stores kernels in few bits, from those of the float model."""
    intake = Intake(model, shardings, None)
    found: dict[str, jax.Array] = {}
    for path, array in leaf_paths(params).items():
        found.update(intake.take(path, array))
    return intake.complete(found, seed=0)


def _float_config(config: Config) -> Config:
    """Without rounding in products, which trained the weights and is no part of them.

    Raises:
        ConfigError: weights are stored in few bits already, or have adapters.
    """
    compute = config.compute
    if compute.weight_quantization is not None:
        raise ConfigError(
            f"weight_quantization={compute.weight_quantization}: these kernels are in few bits already. Quantize the "
            f"float model that they were made from; method={compute.weight_quantization} says what to make of it."
        )
    if compute.lora_rank:
        raise ConfigError(
            f"lora_rank={compute.lora_rank}: quantize rounds kernels, and adapters beside them were trained for these "
            "as they are. Merge them first, by maxlite convert-hf RUN FOLDER, and quantize the folder."
        )
    # Text for calibration is what training sees; else only what is held out is looked at.
    config = config if config.quantize.method in _CALIBRATED else with_held_out_alone(config)
    return dataclasses.replace(config, compute=dataclasses.replace(compute, quantization=None, quant_rules=None))


def _stored_config(config: Config) -> Config:
    """What the run's own config.yml says.

    Raises:
        ConfigError: the keys do not go together.
    """
    method = config.quantize.method
    compute = dataclasses.replace(
        config.compute, quantization=None, quant_rules=None, weight_quantization=_CALIBRATED.get(method, method)
    )
    stored = dataclasses.replace(config, compute=compute)
    problems = [problem for check in QUANT_CHECKS for problem in check(stored)]
    if problems:
        raise ConfigError("\n".join(problems))
    return stored


def _write_run(config: Config, params: Params, source: Path, folder: Path, destination: Path) -> None:
    save_parameters(config, params, folder, destination)
    keep_files(run_of(source), folder)
    if config.data.tokenizer_path is not None:
        keep_tokenizer(Path(config.data.tokenizer_path).expanduser(), folder)
    title = f"{run_of(source).resolve().name}, quantized by {config.quantize.method}"
    (folder / "model.yml").write_text(dump_model(config, title))
    (folder / "config.yml").write_text(dump_config(config_of_run(config, destination)))
