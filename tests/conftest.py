"""Fixtures of all tests, and the environment that jax must find before it is imported anywhere."""

import functools
import os
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

# Programs compiled in one test, or in a process that a test starts, serve the others too. The folder goes at the
# end of the session; a developer who names one in the environment keeps it.
_OWN_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _OWN_CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="maxlite-tests-")
_CACHE = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
# Eight fake devices; and programs that run for a moment are better compiled fast than compiled well: in one piece, and
# with the older, quicker emitters of fusions where XLA still has them.
_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    *["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10."),
]
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": " ".join(_FLAGS),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
for _name in [name for name in os.environ if name.upper().startswith("MAXLITE_")]:
    del os.environ[_name]

import pytest  # noqa: E402

from maxlite.config.load import load_config  # noqa: E402
from maxlite.config.schema import Config  # noqa: E402
from tests import forks  # noqa: E402
from tests.forks import ENTRY_POINT, Ended  # noqa: E402

assert "jax" not in sys.modules, "jax was imported before the tests' environment was set"

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "vocab_size=64",
    "emb_dim=64",
    "mlp_dim=96",
    "num_decoder_layers=2",
    "num_query_heads=4",
    "num_kv_heads=2",
    "head_dim=16",
    "dtype=float32",
    "dataset_type=synthetic",
    "max_target_length=32",
    "per_device_batch_size=1",
)
# What makes the attention of such a model latent.
LATENT = (
    "attention_pattern=[mla]",
    "num_kv_heads=4",
    "head_dim=12",
    "qk_nope_head_dim=8",
    "qk_rope_head_dim=4",
    "v_head_dim=6",
    "kv_lora_rank=16",
    "q_lora_rank=16",
)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)


def load_tiny(*overrides: str, path: str = "base.yml") -> Config:
    """A model of 2 layers and 64 tokens; an override replaces a tiny size."""
    given = {text.partition("=")[0] for text in overrides}
    tiny = [text for text in TINY if text.partition("=")[0] not in given]
    return load_config(path, [*tiny, *overrides], {})


def start_maxlite(
    arguments: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None, *, timeout: float = 240
) -> Ended:
    """Runs `maxlite ARGUMENTS` in a process of its own, in a clean environment plus `env`."""
    process = subprocess.run(
        [sys.executable, "-P", "-c", ENTRY_POINT, *arguments],
        cwd=cwd,
        env=clean_environment() | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    return Ended(process.returncode, process.stdout, process.stderr)


def clean_environment() -> dict[str, str]:
    """The environment of a process under test: this checkout first, a home of its own, no fake devices."""
    home = _CACHE / "home"
    home.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return env | {
        "HOME": str(home),
        "PYTHONUSERBASE": site.getuserbase(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "COLUMNS": "120",
    }


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Makes the eight devices before a test can ask this process for fewer (cpu_devices=1) and be taken at its word."""
    import jax

    assert len(jax.devices()) == 8


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Config]:
    """tiny_config(*overrides): the config of a tiny model, without reading the environment."""
    return load_tiny


@pytest.fixture(scope="session")
def run_maxlite() -> Callable[..., Ended]:
    """run_maxlite(arguments, cwd, env): runs the command line and returns code, stdout, stderr."""
    return start_maxlite


@pytest.fixture(scope="session")
def fork_maxlite(process_environment) -> Callable[..., Ended]:
    """What `run_maxlite` is, but for imports of other people's modules, and in a quarter of its time."""
    return functools.partial(forks.fork_maxlite, process_environment)


@pytest.fixture(scope="session")
def process_environment() -> dict[str, str]:
    """The environment that `run_maxlite` gives its processes, for tests that start one themselves."""
    return clean_environment()
