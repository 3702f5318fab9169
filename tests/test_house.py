"""The rules of the house, read from the syntax trees of the code and from the text files of the repository."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from maxlite.config.load import load_config, model_names
from maxlite.config.schema import KEYS, SECTIONS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "maxlite"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {str(file.relative_to(ROOT)): file for file in FILES}

FLOORS = {
    "errors": 1,
    "config": 2,
    "processes": 3,
    "parallel": 4,
    "checkpoint": 4,
    "metrics": 4,
    "ops": 5,
    "data": 5,
    "nn": 6,
    "model": 7,
    "hf": 8,
    "train": 9,
    "decode": 9,
    # Above train, because it compiles the step that train runs.
    "estimate": 10,
    # Above train, whose evaluation and batches it takes.
    "quantize": 10,
    "launcher": 11,
}
# A library -> the only places that may import it.
DOORS = {
    "typer": ("launcher/",),
    "rich": ("launcher/", "metrics/progress.py", "metrics/byte_progress.py"),
    "omegaconf": ("config/",),
    "yaml": ("config/",),
    "orbax": ("checkpoint/",),
    "tensorboardX": ("metrics/",),
    "array_record": ("data/",),
    "pyarrow": ("data/",),
    "fsspec": ("data/", "checkpoint/place.py"),
    "etils": ("checkpoint/place.py",),
    "jinja2": ("data/chat_template.py",),
    "tokenizers": ("data/",),
    "qwix": ("ops/quantized",),
    "matplotlib": ("quantize/plot.py",),
    "optax": ("train/",),
    "flax": ("nn/", "model/"),
}
# What lifts a function over modules, or takes a module apart.
LIFTED = {"vmap", "scan", "remat", "split", "merge", "split_rngs", "jit", "eval_shape"}
LIFTED_AT = ("model/stack.py", "model/build.py")
WITHOUT_JAX = (
    "errors.py",
    "config/",
    "launcher/cli.py",
    "checkpoint/names.py",
    "processes/bell.py",
    "processes/cluster.py",
    "processes/roll_call.py",
    "launcher/launch.py",
    "launcher/resolve.py",
    "hf/config_json.py",
    "hf/fam",
    "hf/folder.py",
    "hf/peft_json.py",
)
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 6
# Attention's inputs are what they are: three tensors, their positions and segments, and four settings.
# All attention kernels take the same arguments.
KERNELS = (
    "ops/attention.py dot_product_attention",
    "ops/attention.py self_attention",
    "ops/attention.py plain_attention",
    "ops/attention.py _attend_rows",
    "ops/flash_attention.py flash_attention",
    "ops/flash_attention.py flash_forward",
    "ops/flash_attention.py flash_backward",
    "ops/splash_attention.py splash_attention",
    "ops/cudnn_attention.py cudnn_attention",
    "ops/context_parallel.py context_attention",
)
MANY_PARAMETERS = {tuple(name.split()) for name in KERNELS} | {("ops/loss.py", "chunked_cross_entropy")}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def inside(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def room(name: str) -> str:
    """The room of a dotted module name or of a path inside the package."""
    return re.split(r"[./]", name.removeprefix("maxlite."))[0]


def imports(file: Path) -> Iterator[tuple[str, ast.AST]]:
    """Every module that `file` imports, inside functions too, by its full dotted name."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{inside(file)}:{node.lineno}: relative import"
            yield str(node.module), node


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def attribute_chains(node: ast.AST) -> Iterator[str]:
    """a.b.c for every attribute access below `node`."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            yield ast.unparse(child)


def test_every_room_has_a_floor():
    assert {room(inside(file).removesuffix(".py")) for file in FILES} - {"__init__"} <= FLOORS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_imports_go_down(name):
    file = NAMES[name]
    here = room(inside(file).removesuffix(".py"))
    for module, node in imports(file):
        if module.split(".")[0] == "maxlite":
            there = room(module)
            assert there == here or FLOORS[there] < FLOORS[here], f"{name}:{node.lineno} imports {module}"


@pytest.mark.parametrize("name", NAMES)
def test_one_library_one_door(name):
    here = inside(NAMES[name])
    for module, node in imports(NAMES[name]):
        library = module.split(".")[0]
        assert here.startswith(DOORS.get(library, ("",))), f"{name}:{node.lineno} imports {module}"
        assert library not in ("pickle", "cloudpickle", "dill", "shelve", "marshal"), f"{name}: {module}"
        assert library != "jax" or not here.startswith(WITHOUT_JAX), f"{name}:{node.lineno} imports jax"
    if not here.startswith(LIFTED_AT):
        lifted = {chain for chain in attribute_chains(tree_of(NAMES[name])) if chain.startswith("nnx.")}
        assert not lifted & {f"nnx.{word}" for word in LIFTED}, name
        assert "allow_pickle=True" not in ast.unparse(tree_of(NAMES[name]))


def test_no_import_goes_round_in_a_circle():
    modules = {f"maxlite.{inside(file).removesuffix('.py').replace('/', '.')}": file for file in FILES}
    wanted = {name: {module for module, _ in imports(file)} & modules.keys() for name, file in modules.items()}
    while leaves := {name for name, needs in wanted.items() if not needs}:
        wanted = {name: needs - leaves for name, needs in wanted.items() if name not in leaves}
    assert not wanted, f"these import one another: {sorted(wanted)}"


@pytest.mark.parametrize("name", NAMES)
def test_imports_stand_at_the_top(name):
    if inside(NAMES[name]) == "launcher/cli.py":
        pytest.skip("each command imports its room when it runs, so that help and errors are instant")
    for function in functions(NAMES[name]):
        for node in ast.walk(function):
            assert not isinstance(node, ast.Import | ast.ImportFrom), f"{name}:{node.lineno}"


@pytest.mark.parametrize("name", NAMES)
def test_rooms_are_small(name):
    assert len(NAMES[name].read_text().splitlines()) <= MAX_FILE_LINES
    for function in functions(NAMES[name]):
        where = f"{name}:{function.lineno} {function.name}"
        assert function.end_lineno - function.lineno < MAX_FUNCTION_LINES, where
        given = function.args
        parameters = [
            a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")
        ]
        if (inside(NAMES[name]), function.name) not in MANY_PARAMETERS:
            assert len(parameters) <= MAX_PARAMETERS, where


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    assert not re.search(r"(^|/)(utils?|common|helpers?|misc)(\.py|/|$)", name)
    for function in functions(NAMES[name]):
        assert not re.match(r"_?(get|maybe|do)_", function.name), f"{name}:{function.lineno} {function.name}"


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("__init__.py")])
def test_init_files_hold_only_a_docstring(name):
    (statement,) = tree_of(NAMES[name]).body
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@pytest.mark.parametrize("name", [name for name in NAMES if re.match(r"maxlite/(nn|model)/", name)])
def test_a_forward_pass_reads_no_config(name):
    sections = {*SECTIONS, "config"}
    for function in functions(NAMES[name]):
        if function.name == "__call__":
            for node in ast.walk(function):
                read = (isinstance(node, ast.Name) and node.id) or (isinstance(node, ast.Attribute) and node.attr)
                assert read not in sections, f"{name}:{node.lineno} reads {read}"


def test_the_models_name_is_a_label():
    # train/run.py names the run's folder by it, and prints it.
    for file in FILES:
        if not inside(file).startswith(("config/load.py", "launcher/", "train/run.py")):
            chains = set(attribute_chains(tree_of(file)))
            assert not {chain for chain in chains if chain.endswith("run.model")}, inside(file)


def unread_keys() -> list[str]:
    """Keys that no code outside config/ reads, and no rule or fold inside it."""
    read = set()
    for file in FILES:
        if inside(file) not in ("config/schema.py", "config/smoke.py", "config/check.py"):
            read |= {node.attr for node in ast.walk(tree_of(file)) if isinstance(node, ast.Attribute)}
            text = {
                n.value for n in ast.walk(tree_of(file)) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
            # A table of keys, as the sizes that a mesh must divide.
            read |= text & KEYS.keys()
    # Read by the loader, before there is a config; or by a rule, which refuses longer rows; or by their pattern.
    read |= {"model", "smoke", "max_position_embeddings"} | {
        key for key in KEYS if re.fullmatch(r"(dcn|ici)_\w+_parallelism", key)
    }
    return [key for key in KEYS if key not in read]


def test_every_key_is_read_by_some_code():
    assert unread_keys() == []


@pytest.mark.parametrize("name", ["default", *model_names()])
def test_every_model_loads(name):
    config = load_config("base.yml", [f"model={name}", "max_target_length=64"], {})
    assert config.run.model == name


def text_files() -> list[Path]:
    folders = [ROOT / name for name in ("maxlite", "models", "tests", "docs", "scripts", ".ci")]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    files += [file for file in ROOT.iterdir() if file.is_file()]
    return [file for file in files if "__pycache__" not in file.parts and file.suffix not in (".pyc", ".png")]


# In pieces, so that this file does not hold what it looks for.
FORBIDDEN = re.compile(
    r"https?://[^\s/]*(?:py" + r"pi|pythonhosted|/simple)|index" + r"-url|/(?:ho" + r"me|ro" + r"ot|Us" + r"ers)/\w"
)


def test_no_package_index_and_no_path_of_a_home():
    for file in text_files():
        text = file.read_bytes().decode("utf-8", errors="ignore")
        if found := FORBIDDEN.search(text):
            line = text[: found.start()].count("\n") + 1
            pytest.fail(f"{file.relative_to(ROOT)}:{line}: {found[0]}")
