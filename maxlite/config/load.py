"""base.yml, model YAML, environment and command line -> one frozen Config, or every problem at once."""

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from maxlite.config.check import CHECKS
from maxlite.config.schema import COMMAND_LINE, ENVIRONMENT, KEYS, PROCESS_KEYS, SECTIONS, Config
from maxlite.config.smoke import smoke_overrides
from maxlite.config.values import describe_allowed, parse_value, plain_value
from maxlite.config.yaml_file import Entry, read_yaml
from maxlite.errors import ConfigError

ENVIRONMENT_PREFIX = "MAXLITE_"
DEFAULT_MODEL = "default"
SHOWN_LETTERS = 80
FREE_TEXT = frozenset({"prompt"})
RESOLVED_HEADER = "# Resolved by maxlite: complete, so model YAMLs are not read again."
MODEL_KEYS = frozenset(name for name, key in KEYS.items() if key.section == "model")
MESH_KEYS = frozenset(name for name, key in KEYS.items() if key.section == "parallel") - {"mesh"}
TOKENIZER_FILE = "tokenizer.json"
# What a model YAML always says.
MODEL_SIZES = frozenset(
    {"vocab_size", "emb_dim", "num_decoder_layers", "num_query_heads", "num_kv_heads", "head_dim", "mlp_dim"}
    | {"max_position_embeddings"}
)
# From the folder that load_hf names to the keys that its files decide: the architecture, the tokenizer.
FolderReader = Callable[[str], Mapping[str, Any]]
# Names that people bring from MaxText, and what they are called here.
RENAMED = {
    "model_name": "model",
    "base_emb_dim": "emb_dim",
    "base_num_query_heads": "num_query_heads",
    "base_num_kv_heads": "num_kv_heads",
    "base_mlp_dim": "mlp_dim",
    "base_num_decoder_layers": "num_decoder_layers",
    "mlp_activations": "mlp_activation",
    "rope_linear_scaling_factor": "rope_factor",
    "base_moe_mlp_dim": "moe_mlp_dim",
    "first_num_dense_layers": "num_dense_layers",
    "use_post_attn_norm": "use_post_norms",
    "use_post_ffw_norm": "use_post_norms",
    "shared_experts": "shared_expert_mlp_dim",
    "global_rope_max_timescale": "rope_max_timescale",
    "global_rope_proportion": "partial_rotary_factor",
    "ici_stage_parallelism": "ici_pipeline_parallelism",
    "dcn_stage_parallelism": "dcn_pipeline_parallelism",
    "ici_sequence_parallelism": "ici_context_parallelism",
    "ici_tensor_sequence_parallelism": "ici_tensor_parallelism",
    "custom_mesh": "mesh",
    "custom_mesh_and_rule": "mesh",
    "context_parallel_size": "ici_context_parallelism",
    "grain_packing_type": "packing_type",
    "grain_worker_count": "data_worker_count",
    "grain_per_worker_buffer_size": "data_worker_buffer_size",
    "grain_train_files": "dataset_path",
    "grain_eval_files": "eval_dataset_path",
    "hf_train_files": "dataset_path",
    "hf_eval_files": "eval_dataset_path",
    "hf_path": "dataset_path",
    "grain_train_mixture_config_path": "dataset_mixture",
    "use_sft": "objective",
}


def package_roots() -> tuple[Path, ...]:
    """Folders that hold base.yml and models/: the installed package, or the checkout that it is run from."""
    package = Path(__file__).resolve().parents[1]
    checkout = (package.parent,) if (package.parent / "pyproject.toml").is_file() else ()
    return (package, *checkout)


def load_config(
    path: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    folder_reader: FolderReader | None = None,
) -> Config:
    """Resolves a config from a YAML file or run directory and `key=value` overrides.

    folder_reader: takes the place of the model YAML where load_hf names a folder and no model is named.

    Raises:
        ConfigError: lists every problem found: unreadable files, unknown keys, values, combinations.
    """
    loading = _Loading(os.environ if environment is None else environment, folder_reader)
    return loading.load(path, overrides)


def dump_config(config: Config) -> str:
    """Returns the YAML text of `config`: every key, so that it loads to the same values anywhere.

    What one process was told at its start is left out, and the fake devices are those of all.
    """
    plain = {name: plain_value(value) for name, value in saved_values(config).items()}
    return RESOLVED_HEADER + "\n" + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)


def saved_values(config: Config) -> dict[str, Any]:
    """Returns key -> value as a run's config.yml has them: the same for any number of processes."""
    return {**config.flat(), **dict.fromkeys(PROCESS_KEYS), "cpu_devices": config.fake_devices}


def dump_model(config: Config, title: str) -> str:
    """Returns the text of a model YAML: the architecture's sizes, and its switches where they differ from base.yml."""
    off = {name: _parse_entry(name, entry) for name, entry in _base_entries().items()}
    values = {name: value for name, value in config.flat().items() if name in MODEL_KEYS}
    kept = {name: plain_value(value) for name, value in values.items() if name in MODEL_SIZES or value != off[name]}
    return f"# {title}.\n" + yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=120)


def model_names() -> list[str]:
    """Names of the model YAMLs that come with maxlite."""
    return _names("models")


def mesh_names() -> list[str]:
    """Names of the mesh presets that come with maxlite."""
    return _names("meshes")


def _names(folder: str) -> list[str]:
    return sorted({file.stem for root in package_roots() for file in (root / folder).glob("*.yml")})


class _Loading:
    """One load: collects entries and problems; later layers replace earlier ones."""

    def __init__(self, environment: Mapping[str, str], folder_reader: FolderReader | None):
        self.environment = environment
        self.folder_reader = folder_reader
        self.entries: dict[str, Entry] = {}
        self.problems: list[str] = []

    def load(self, path: str, overrides: Sequence[str]) -> Config:
        file = _find_base(path)
        command_line = self._command_line(overrides)
        environment = self._environment()
        defaults = _base_entries()
        self.entries.update(defaults)
        resolved = False
        if file not in [(root / "base.yml").resolve() for root in package_roots()]:
            self._add(self._read(file, _short(file)))
            resolved = _is_resolved(file)
        if Path(path).is_dir():
            # The folder itself is the run, wherever it has been moved and whatever it was called.
            self.entries["base_output_directory"] = Entry(str(file.parent.parent), f"run directory {path}")
            self.entries["run_name"] = Entry(file.parent.name, f"run directory {path}")
            if self.entries["tokenizer_path"].value is not None and (file.parent / TOKENIZER_FILE).is_file():
                self.entries["tokenizer_path"] = Entry(str(file.parent), f"run directory {path}")
        named = command_line.get("model") or environment.get("model")
        folder = command_line.get("load_hf") or environment.get("load_hf")
        replaced = bool(named or folder)
        if replaced and resolved:
            # Another model takes the place of the saved one, all of it.
            self.entries.update({name: defaults[name] for name in MODEL_KEYS})
        if replaced or not resolved:
            self._add_model(named, folder or self.entries["load_hf"])
        mesh = command_line.get("mesh") or environment.get("mesh")
        if mesh or (not resolved and self.entries["mesh"].value is not None):
            self._add_mesh(mesh or self.entries["mesh"])
        self._add_tokenizer({**environment, **command_line})
        # A resolved file is shrunk already, unless another model has just taken its place.
        shrink = replaced or not resolved
        values = self._values({**environment, **command_line}, defaults, shrink)
        config = _build(values, {name: entry.source for name, entry in self.entries.items()})
        # Where a value was refused, its default stands in for it here, so a finding may be about that.
        self.problems += [message for check in CHECKS for message in check(config)]
        if self.problems:
            raise ConfigError("\n".join(dict.fromkeys(self.problems)))
        return config

    def _values(self, last: dict[str, Entry], base: Mapping[str, Entry], shrink: bool) -> dict[str, Any]:
        defaults = {name: _parse_entry(name, entry) for name, entry in base.items()}
        values = {name: self._parse(name, self.entries[name], defaults[name]) for name in KEYS}
        smoke = self._parse("smoke", last["smoke"], False) if "smoke" in last else values["smoke"] and shrink
        if smoke:
            for name, value in smoke_overrides(values).items():
                values[name] = value
                self.entries[name] = Entry(value, "smoke=true")
        for name, entry in last.items():
            values[name] = self._parse(name, entry, defaults[name])
        self.entries.update(last)
        return values

    def _parse(self, name: str, entry: Entry, default: Any) -> Any:
        try:
            return _parse_entry(name, entry)
        except ValueError as error:
            allowed = describe_allowed(KEYS[name])
            self.problems.append(f"{name}={_shown(entry)} ({entry.source}): {error}; it takes {allowed}.")
            return default

    def _add(self, entries: dict[str, Entry]) -> None:
        self.entries.update(self._known(entries))

    def _known(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        for name, entry in entries.items():
            if name not in KEYS:
                self.problems.append(f"{entry.source}: unknown key {name}{suggestion(name)}")
            elif "${" in str(entry.value) and name not in FREE_TEXT:
                # It would stay as it is, and who wrote it hoped for something else.
                self.problems.append(f"{entry.source}: {name} holds ${{...}}, which is not supported; write the value.")
        return {name: entry for name, entry in entries.items() if name in KEYS}

    def _read(self, file: Path, label: str) -> dict[str, Entry]:
        entries, problems = read_yaml(file, label)
        self.problems += problems
        return entries

    def _add_model(self, named: Entry | None, folder: Entry) -> None:
        """The architecture: from the model that is named, else from a Hugging Face folder, else from a file's model."""
        path = self._parse("load_hf", folder, None)
        if named is not None or path is None or self.folder_reader is None:
            self._add_model_yaml(named or self.entries["model"])
            return
        source = f"load_hf={path}"
        found = {name: Entry(plain_value(value), source) for name, value in self.folder_reader(path).items()}
        self.entries.update({"model": Entry(Path(path).resolve().name, source), **found})

    def _add_tokenizer(self, last: dict[str, Entry]) -> None:
        """Parameters of a run that has a tokenizer come with it: ids of another one would mean nothing to them."""
        given = last.get("load_parameters_path") or self.entries["load_parameters_path"]
        path = self._parse("load_parameters_path", given, None)
        if path is None or "tokenizer_path" in last or self.entries["tokenizer_path"].value is not None:
            return
        place = Path(path).expanduser()
        run = place.parents[1] if place.parent.name == "checkpoints" else place
        if (run / TOKENIZER_FILE).is_file():
            self.entries["tokenizer_path"] = Entry(str(run), f"load_parameters_path={path}")

    def _add_model_yaml(self, named: Entry) -> None:
        name = named.text or str(named.value)
        if name == DEFAULT_MODEL:
            self.entries["model"] = named
            return
        hint = "; `maxlite models` lists those that exist."
        entries = self._part_of_config(named, name, "models", MODEL_KEYS, hint)
        if entries is not None:
            self.entries.update(entries)
            self.entries["model"] = named

    def _add_mesh(self, named: Entry) -> None:
        name = named.text or str(named.value)
        if name != "null":
            hint = f"; there are {', '.join(mesh_names())}."
            self.entries.update(self._part_of_config(named, name, "meshes", MESH_KEYS, hint) or {})
        self.entries["mesh"] = named

    def _part_of_config(
        self, named: Entry, name: str, folder: str, allowed: frozenset[str], hint: str
    ) -> dict[str, Entry] | None:
        """The keys of a YAML that may set only some: by its name in `folder`, or by its path; None if there is none."""
        kind = {"models": "model YAML", "meshes": "mesh preset"}[folder]
        file = _find_part(name, folder)
        if file is None:
            near = difflib.get_close_matches(name, _names(folder), 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else hint
            self.problems.append(f"{named.source}: no {kind} {name}{hint}")
            return None
        entries = self._known(self._read(file, f"{folder}/{file.name}" if file.stem == name else _short(file)))
        what = "architecture keys" if folder == "models" else "keys of the parallel section"
        for key in sorted(set(entries) - allowed):
            self.problems.append(
                f"{entries[key].source}: a {kind} may set only {what}, and {key} is not one; "
                "give it on the command line or in the base file."
            )
        return {key: entry for key, entry in entries.items() if key in allowed}

    def _environment(self) -> dict[str, Entry]:
        prefixed = {k: v for k, v in self.environment.items() if k.upper().startswith(ENVIRONMENT_PREFIX)}
        return self._known(
            {k[len(ENVIRONMENT_PREFIX) :].lower(): Entry(v, f"{ENVIRONMENT}{k}") for k, v in sorted(prefixed.items())}
        )

    def _command_line(self, overrides: Sequence[str]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for text in overrides:
            name, equals, value = text.partition("=")
            name = name.strip()
            if not equals or not name:
                self.problems.append(f"command line: {text!r} is not key=value.")
            elif name.startswith("-"):
                self.problems.append(f"command line: write {name.lstrip('-')}={value}, without dashes.")
            elif name in entries:
                self.problems.append(f"command line: {name} is given twice ({entries[name].value} and {value}).")
            else:
                entries[name] = Entry(value, COMMAND_LINE)
        return self._known(entries)


def _parse_entry(name: str, entry: Entry) -> Any:
    # By its spelling, so that 010 or yes mean the same in a file as on the command line.
    spelled = entry.text is not None and entry.value is not None
    return parse_value(KEYS[name], entry.text if spelled else entry.value)


def _shown(entry: Entry) -> str:
    text = entry.text if entry.text else "null" if entry.value is None else str(entry.value)
    return text if len(text) <= SHOWN_LETTERS else text[:SHOWN_LETTERS] + "..."


def suggestion(name: str) -> str:
    """The end of an unknown-key message: the new name of an old one, or the nearest."""
    if name in RENAMED:
        return f"; here it is called {RENAMED[name]}."
    near = difflib.get_close_matches(name, KEYS, 3, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else "; `maxlite config base.yml` lists all keys."


def _build(values: dict[str, Any], sources: dict[str, str]) -> Config:
    sections = {
        section: cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})
        for section, cls in SECTIONS.items()
    }
    return Config(**sections, sources=sources)


@functools.cache
def _base_entries() -> Mapping[str, Entry]:
    # Read once a process: `maxlite models` and the tests load hundreds of configs.
    entries, problems = read_yaml(_package_file("base.yml"), "base.yml")
    assert not problems and entries.keys() == KEYS.keys(), f"base.yml and the schema differ: {problems}"
    return entries


def _package_file(name: str) -> Path:
    return next(file for root in package_roots() if (file := root / name).is_file())


def _find_base(path: str) -> Path:
    file = Path(path)
    if file.is_dir():
        if not (file / "config.yml").is_file():
            raise ConfigError(f"{path}: a folder without config.yml is not a run directory.")
        return (file / "config.yml").resolve()
    for candidate in (file, *(root / path for root in package_roots())):
        if candidate.is_file():
            return candidate.resolve()
    raise ConfigError(f"{path}: no such YAML file or run directory (looked here and among maxlite's own files).")


def _find_part(name: str, folder: str) -> Path | None:
    given = Path(name)
    spelled = [given] if given.suffix in (".yml", ".yaml") else [Path(folder, f"{name}.yml")]
    bases = [Path(), *package_roots()]
    return next((base / file for base in bases for file in spelled if (base / file).is_file()), None)


def _is_resolved(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline().rstrip("\n") == RESOLVED_HEADER


def _short(file: Path) -> str:
    try:
        return str(file.relative_to(Path.cwd()))
    except ValueError:
        return str(file)
