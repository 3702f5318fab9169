"""The `maxlite` command. Each command imports its room when it runs, so that help and config errors are instant."""

import os
import sys
from typing import Annotated

import typer

from maxlite.errors import MaxliteError, PreemptedError

app = typer.Typer(
    name="maxlite",
    help="Train large language models in JAX from one YAML config.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: with rich's panels it takes twice as long to appear.
    rich_markup_mode=None,
)

# `--steps=5` reaches the config, whose message says how to write it.
KEYS_WITH_DASHES = {"ignore_unknown_options": True}
ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file such as base.yml, or a run directory.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Any key of base.yml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Only JSON on standard output.")]


@app.command(context_settings=KEYS_WITH_DASHES)
def train(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Train; the same command again resumes."""
    from maxlite.launcher.resolve import resolve_config

    resolved = resolve_config(config, overrides or [])
    from maxlite.launcher.sample import check_sample, print_sample
    from maxlite.train.run import run_train

    check_sample(resolved)
    print_sample(resolved, run_train(resolved))


@app.command(context_settings=KEYS_WITH_DASHES)
def decode(config: ConfigArgument, overrides: Overrides = None, json_output: JsonOption = False) -> None:
    """Continue prompts from a run, a Hugging Face folder, a GGUF file, or base.yml with load_parameters_path=."""
    from maxlite.launcher.resolve import resolve_config

    resolved = resolve_config(config, overrides or [], prompts_may_be_ids=True)
    from maxlite.decode.run import run_decode

    run_decode(resolved, config, json_output=json_output)


@app.command("eval", context_settings=KEYS_WITH_DASHES)
def evaluate(config: ConfigArgument, overrides: Overrides = None, json_output: JsonOption = False) -> None:
    """Loss and perplexity over all that is held out: of a run, its checkpoint, or a Hugging Face folder."""
    from maxlite.launcher.resolve import from_run, resolve_config

    resolved = resolve_config(*from_run(config, overrides or []))
    from maxlite.launcher.evaluate import print_evaluation

    print_evaluation(resolved, config, json_output=json_output)


@app.command(context_settings=KEYS_WITH_DASHES)
def estimate(
    config: ConfigArgument,
    overrides: Overrides = None,
    json_output: JsonOption = False,
    decode_step: Annotated[bool, typer.Option("--decode", help="Prefill and a decoding step, not training.")] = False,
) -> None:
    """Compile the step for compile_topology, no chip needed: memory, FLOPs, traffic, time at best, what to change."""
    from maxlite.launcher.resolve import resolve_config

    resolved = resolve_config(config, overrides or [])
    from maxlite.launcher.estimate import print_estimate

    print_estimate(resolved, json_output, decode_step)


@app.command("compile", context_settings=KEYS_WITH_DASHES)
def compile_step(config: ConfigArgument, overrides: Overrides = None, json_output: JsonOption = False) -> None:
    """Estimate the training step and write it to compiled_trainstep_file, which train then need not compile."""
    from maxlite.launcher.resolve import resolve_config

    resolved = resolve_config(config, overrides or [])
    from maxlite.launcher import estimate as commands

    commands.compile_step(resolved, json_output)


@app.command("convert-hf", context_settings=KEYS_WITH_DASHES)
def convert_hf(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A Hugging Face folder, GGUF file, PEFT's adapters, a run or a step.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="DST [KEY=VALUE]...", help="A new folder; weight_dtype= is its dtype.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print every tensor, its transform and shapes.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare logits with transformers, if installed.")] = False,
    adapters: Annotated[bool, typer.Option("--adapters", help="Of a run with adapters: only these, for PEFT.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of an export.")] = "5GB",
) -> None:
    """Convert a Hugging Face folder, GGUF file or PEFT adapters to a run, or a run to such a folder."""
    from maxlite.hf.folder import is_model_folder, read_folder
    from maxlite.hf.peft_json import is_adapter_folder

    given = arguments or []
    destination = given[0] if given and "=" not in given[0] else None
    overrides = given[1:] if destination else given
    if is_model_folder(source):
        # What is wrong with config.json shows before jax is loaded.
        read_folder(source)
    if adapters or is_adapter_folder(source):
        from maxlite.launcher.adapters import convert_adapters

        convert_adapters(source, destination, overrides)
        return
    from maxlite.launcher.convert import convert

    convert(source, destination, overrides, max_shard_size, {"explain": explain, "check": check})


@app.command(context_settings=KEYS_WITH_DASHES)
def quantize(
    source: Annotated[
        str, typer.Argument(metavar="RUN_OR_HF", help="A run, its checkpoint, a Hugging Face folder or a GGUF file.")
    ],
    destination: Annotated[str, typer.Argument(metavar="OUT", help="The run to make.")],
    overrides: Overrides = None,
) -> None:
    """Store a model's weights in few bits (method=int8, int4, nf4, fp8, gptq or awq) and report what that costs."""
    from maxlite.launcher.quantize import quantize as quantize_run

    quantize_run(source, destination, overrides or [])


@app.command("config", context_settings=KEYS_WITH_DASHES)
def show_config(config: ConfigArgument, overrides: Overrides = None, json_output: JsonOption = False) -> None:
    """Print the resolved config, each value with its source; `config diff A B` compares two."""
    from maxlite.launcher import show
    from maxlite.launcher.resolve import resolve_config

    if config == "diff":
        show.print_diff(overrides or [], json_output)
    else:
        show.print_config(resolve_config(config, overrides or []), json_output)


@app.command()
def models(
    action: Annotated[str | None, typer.Argument(metavar="[show NAME]", help="show: one model in full.")] = None,
    name: Annotated[str | None, typer.Argument(hidden=True)] = None,
    overrides: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    json_output: JsonOption = False,
) -> None:
    """List the model YAMLs, or show one: sizes and exact parameter counts."""
    from maxlite.launcher.models import print_model, print_models

    if action is None:
        print_models(json_output)
    else:
        print_model(action, name, overrides or [], json_output)


data_app = typer.Typer(
    help="Look at the data, or make it into tokens before training.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(data_app, name="data")


@data_app.command("inspect", context_settings=KEYS_WITH_DASHES)
def inspect_data(
    config: ConfigArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]... [batches=K]", help="Any key of base.yml; batches to show."),
    ] = None,
    json_output: JsonOption = False,
    show_mask: Annotated[
        bool, typer.Option("--show-mask", help="The first batch as text: what is trained, what is only read.")
    ] = False,
) -> None:
    """Print what the data amounts to: documents, tokens, padding, what is cut or skipped; and its first batches."""
    from maxlite.launcher import data
    from maxlite.launcher.resolve import resolve_config

    num_batches, keys = data.take_batches(overrides or [])
    data.inspect(resolve_config(config, keys), num_batches, json_output=json_output, show_mask=show_mask)


@data_app.command("tokenize", context_settings=KEYS_WITH_DASHES)
def tokenize_data(
    config: ConfigArgument,
    destination: Annotated[str, typer.Argument(metavar="OUT", help="A folder, new or begun by this command.")],
    overrides: Overrides = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, max=1024, help="Processes that encode, 0.5 GB each; 0 = this one; unset = one a core."),
    ] = None,
) -> None:
    """Write dataset_path in tokens, to be trained on as dataset_type=tokenized; the same command again goes on."""
    from maxlite.launcher.data import run_tokenize
    from maxlite.launcher.resolve import resolve_config

    run_tokenize(
        resolve_config(config, overrides or []), destination, (os.cpu_count() or 1) if workers is None else workers
    )


ckpt_app = typer.Typer(
    help="Look at the checkpoints of a run, check them, or remove some.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(ckpt_app, name="ckpt")


StepArgument = Annotated[str, typer.Argument(metavar="RUN[/checkpoints/N]", help="A run, or one of its checkpoints.")]


@ckpt_app.command("ls")
def list_checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")], json_output: JsonOption = False
) -> None:
    """List the saves of a run: when, how large, complete or what is missing, and why each is kept."""
    from maxlite.launcher.ckpt import print_list

    print_list(run, json_output)


@ckpt_app.command("show")
def show_checkpoint(checkpoint: StepArgument, json_output: JsonOption = False) -> None:
    """Print every array of a checkpoint with its shape, dtype and sharding, and the data position."""
    from maxlite.launcher.ckpt import print_step

    print_step(checkpoint, json_output)


@ckpt_app.command("diff")
def diff_checkpoints(first: StepArgument, second: StepArgument, json_output: JsonOption = False) -> None:
    """Compare two checkpoints: arrays that one lacks, other shapes, dtypes and values."""
    from maxlite.launcher.ckpt import print_diff

    print_diff(first, second, json_output)


@ckpt_app.command("verify")
def verify_checkpoints(checkpoint: StepArgument, json_output: JsonOption = False) -> None:
    """Read all of a checkpoint, or of each that a run has, and name every array that is not as it was saved."""
    from maxlite.launcher.ckpt import verify

    verify(checkpoint, json_output)


@ckpt_app.command("prune", context_settings=KEYS_WITH_DASHES)
def prune_checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys that say what is kept.")
    ] = None,
    json_output: JsonOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Remove the checkpoints that the run's keep keys, or those given, do not keep."""
    from maxlite.launcher.ckpt import prune

    prune(run, overrides or [], dry_run=dry_run, json_output=json_output)


@ckpt_app.command("plan", context_settings=KEYS_WITH_DASHES)
def plan_checkpoint(
    config: ConfigArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]... [processes=K]", help="Any key of base.yml; how many processes."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Print which process will write which bytes of a checkpoint; the processes need not be there."""
    from maxlite.launcher import ckpt_plan
    from maxlite.launcher.resolve import resolve_config

    ckpt_plan.print_plan(resolve_config(config, ckpt_plan.take_processes(overrides or [])), json_output)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def launch(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="local processes=N -- COMMAND ...", help="Any command of maxlite stands after --."),
    ] = None,
) -> None:
    """Run a command in several processes on this machine; docs/multihost.md says how clusters start them."""
    from maxlite.launcher.launch import launch_local, parse_launch

    sys.exit(launch_local(*parse_launch(arguments or [])))


def main() -> None:
    """Runs the command line; a user's mistake becomes its message and documented exit code, without a traceback.

    A process that is one of several ends the others too.
    """
    # XLA's C++ notes go to standard error unless told otherwise before jax is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        app()
    except PreemptedError as error:
        # All processes of a run come to this, each at the end of its work.
        _print_error(error)
        sys.exit(error.exit_code)
    except MaxliteError as error:
        _leave_others(error)
        _print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        _leave_others(error)
        sys.exit(130)
    except BrokenPipeError as error:
        # The reader (head, less) has left; nothing more to say, and Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave_others(error)
    except Exception as error:
        _leave_others(error)
        raise


def _print_error(error: MaxliteError) -> None:
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr)


def _leave_others(error: BaseException) -> None:
    """Returns in a run of one process only."""
    from maxlite.processes.bell import is_hung, leave_for

    if is_hung():
        leave_for(error)


if __name__ == "__main__":
    main()
