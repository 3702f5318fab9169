"""Which files are meant by a path, folder, glob or URL, under which names, and what cannot be used at all."""

import itertools
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from maxlite.data.files import File, find_files
from maxlite.errors import ConfigError, DataError

WriteFiles = Callable[..., str]
bucket_numbers = itertools.count()


def names(paths: str | tuple[str, ...], kind: str = "text") -> list[str]:
    given = (paths,) if isinstance(paths, str) else paths
    return [file.name for file in find_files(given, "dataset_path", kind)]


@pytest.fixture
def bucket() -> Iterator[str]:
    """The URL of an empty folder in memory."""
    url = f"memory://bucket{next(bucket_numbers)}"
    yield url
    system, path = fsspec.core.url_to_fs(url)
    if system.exists(path):
        system.rm(path, recursive=True)


def write_url(url: str, content: bytes = b"a") -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)  # type: ignore[union-attr]


def test_folder_is_searched_in_name_order_without_hidden_files(write_files: WriteFiles) -> None:
    folder = write_files({"b.txt": "b", "a/z.md": "z", "a/b/c": "c", ".hidden": "h", ".git/config": "g", "a.txt": ""})
    assert names(folder) == names(f"file://{folder}") == ["a.txt", "a/b/c", "a/z.md", "b.txt"]
    assert find_files((folder,), "dataset_path", "text")[1] == File(f"{folder}/a/b/c", "a/b/c")


def test_glob_file_and_list(write_files: WriteFiles) -> None:
    """Names are below the part of a glob before its first wildcard; a file that is named twice counts once."""
    folder = write_files({"x/a.txt": "a", "x/b.md": "b", "y/a.txt": "c"})
    assert names(f"{folder}/*/a.txt") == ["x/a.txt", "y/a.txt"]
    assert names(f"{folder}/**/*.md") == ["x/b.md"]
    assert names(f"{folder}/x/b.md") == ["b.md"]
    assert names((f"{folder}/y", f"{folder}/x/*.md", folder)) == ["a.txt", "b.md", "x/a.txt"]


def test_two_folders_with_the_same_names(write_files: WriteFiles) -> None:
    """No two files have one name, as a row is known by it."""
    folder = write_files({"x/a.txt": "a", "y/a.txt": "b", "z/a.txt": "c"})
    assert names((f"{folder}/x", f"{folder}/y", f"{folder}/z/a.txt")) == ["a.txt", "a.txt#2", "a.txt#3"]


def test_a_file_whose_name_looks_like_a_glob(write_files: WriteFiles, bucket: str) -> None:
    """What exists is taken by its name."""
    assert names(write_files({"a[1].txt": "a", "a1.txt": "b"}) + "/a[1].txt") == ["a[1].txt"]
    write_url(f"{bucket}/a[1].txt")
    assert names(f"{bucket}/a[1].txt") == ["a[1].txt"]


def test_home_is_expanded(write_files: WriteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", write_files({"a.txt": "a"}))
    assert names("~/a.txt") == ["a.txt"]


def test_links_are_followed_once(write_files: WriteFiles) -> None:
    """A linked folder is part of the data; one that leads back to itself ends; a file counts once."""
    elsewhere = write_files({"c.txt": "c"}, folder="elsewhere")
    folder = write_files({"a.txt": "a", "b/b.txt": "b"})
    os.symlink(elsewhere, f"{folder}/linked")
    os.symlink(folder, f"{folder}/b/back")
    os.symlink(f"{folder}/a.txt", f"{folder}/z.txt")
    assert names(folder) == ["a.txt", "b/b.txt", "linked/c.txt"]


def test_default_is_the_standard_library() -> None:
    """Python's own sources, without what pip installed, caches, and files in other encodings."""
    found = find_files(None, "dataset_path", "text")
    assert "json/decoder.py" in {file.name for file in found}
    assert all(file.name.endswith(".py") and "site-packages" not in file.name for file in found)
    assert len(found) > 300
    for file in found:
        Path(file.path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("jsonl", ["a.jsonl", "b.ndjson", "c.jsonl.gz", "d.jsonl.zst", "s/a.jsonl"]),
        ("parquet", ["a.parquet"]),
        ("arrayrecord", ["a.arrayrecord", "a.array_record", "b.array_record-00001-of-00010"]),
    ],
)
def test_a_folder_is_searched_for_the_kinds_suffixes(
    write_files: WriteFiles, bucket: str, kind: str, expected: list[str]
) -> None:
    """What is named itself, or by a glob, may be called anything; folders that a glob names are searched."""
    others = ["README.md", "a.json", "jsonl", "a.parquet.crc", "s/x.array_record.tmp", ".a.jsonl"]
    every = ["a.jsonl", "b.ndjson", "c.jsonl.gz", "d.jsonl.zst", "s/a.jsonl", "a.parquet", "a.arrayrecord"]
    every += ["a.array_record", "b.array_record-00001-of-00010", *others]
    folder = write_files(dict.fromkeys(every, ""))
    for name in every:
        write_url(f"{bucket}/{name}")
    for root in (folder, bucket):
        assert names(root, kind) == sorted(expected)
        assert names(f"{root}/README.md", kind) == ["README.md"]
        matched = names(f"{root}/*", kind)
        assert {"README.md", *expected} <= set(matched)
        assert not {"s/x.array_record.tmp", ".a.jsonl"} & set(matched)


def test_folders_of_save_to_disk(write_files: WriteFiles, bucket: str) -> None:
    """A Dataset, a DatasetDict, or a folder or glob of them; a DatasetDict's splits are not found by themselves."""
    parts = ["one/state.json", "one/data.arrow", "two/dataset_dict.json", "two/train/state.json", "other/a.arrow"]
    folder = write_files(dict.fromkeys(parts, ""))
    for part in parts:
        write_url(f"{bucket}/{part}")
    for root in (folder, bucket):
        assert find_files((f"{root}/one",), "dataset_path", "hf") == [File(f"{root}/one", "one")]
        assert find_files((f"{root}/one/state.json",), "dataset_path", "hf") == [File(f"{root}/one", "one")]
        assert find_files((f"{root}/two/",), "dataset_path", "hf")[0].name == "two"
        assert find_files((root,), "dataset_path", "hf") == [File(f"{root}/{name}", name) for name in ("one", "two")]
        assert names(f"{root}/*", "hf") == names(f"{root}/**", "hf") == ["one", "two"]
        with pytest.raises(DataError, match=r"other holds no folder that Dataset.save_to_disk wrote"):
            find_files((f"{root}/other",), "dataset_path", "hf")


def test_folders_of_save_to_disk_with_no_folder_around_them(
    write_files: WriteFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_files({"state.json": ""}, folder="saved"))
    for given in (".", "state.json"):
        assert find_files((given,), "dataset_path", "hf") == [File(".", "saved")]
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("state.json", "")
    (found,) = find_files((f"zip://::{tmp_path}/all.zip",), "dataset_path", "hf")
    assert found.path == f"zip://::{tmp_path}/all.zip"


def test_urls(bucket: str) -> None:
    """Names as for local files; the found paths can be opened again."""
    for name in ("x/a.txt", "x/b.md", "y/a.txt", "x/.h/c.txt"):
        write_url(f"{bucket}/{name}", name.encode())
    found = find_files((bucket,), "dataset_path", "text")
    assert [file.name for file in found] == ["x/a.txt", "x/b.md", "y/a.txt"]
    for file in found:
        with fsspec.open(file.path) as opened:
            assert opened.read() == file.name.encode()  # type: ignore[union-attr]
    assert names(f"{bucket}/*/a.txt") == ["x/a.txt", "y/a.txt"]
    assert names(f"{bucket}/**/*.md") == ["x/b.md"]
    assert names((f"{bucket}/x/b.md", f"{bucket}/x/")) == ["b.md", "a.txt"]


def test_chained_urls(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("a.jsonl", "deep/b.jsonl", "deep/c.txt"):
            archive.writestr(name, name)
    end = f"::{tmp_path}/all.zip"
    found = find_files((f"zip://{end}",), "dataset_path", "jsonl")
    assert found == [File(f"zip://a.jsonl{end}", "a.jsonl"), File(f"zip://deep/b.jsonl{end}", "deep/b.jsonl")]
    assert find_files((f"zip://deep{end}",), "dataset_path", "jsonl") == [File(f"zip://deep/b.jsonl{end}", "b.jsonl")]
    assert names(f"zip://deep/*.txt{end}") == ["c.txt"]
    assert names(f"zip://*.jsonl{end}") == names(f"simplecache::zip://a.jsonl{end}") == ["a.jsonl"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "missing does not exist"),
        ("*.parquet", r"parquet matches no file"),
        ("y", r"y holds no \*.jsonl or \*.ndjson"),
        ("memory://nowhere/a", "nowhere/a does not exist"),
        ("memory://nowhere/*", r"holds no \*.jsonl"),
        ("nosuch://a", "cannot be read: Protocol not known: nosuch"),
        ("zip://*::missing.zip", "cannot be read: "),
    ],
)
def test_paths_that_hold_nothing(write_files: WriteFiles, path: str, message: str) -> None:
    """Each is an error with exit code 3 that names the path, and the key where it can."""
    folder = write_files({"x/a": "a", "y/.b.jsonl": "b", "y/c.txt": "c"})
    given = path if "://" in path else os.path.join(folder, path)
    with pytest.raises(DataError, match=message) as raised:
        find_files((given,), "eval_dataset_path", "jsonl")
    assert "eval_dataset_path" in str(raised.value) or "cannot be read" in message
    assert given in str(raised.value) and raised.value.exit_code == 3


def test_a_kind_that_has_no_files_of_its_own() -> None:
    with pytest.raises(ConfigError, match="dataset_path is not set, but dataset_type=parquet reads files"):
        find_files(None, "dataset_path", "parquet")


def test_a_folder_that_cannot_be_listed(write_files: WriteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_files({"a.txt": "a", "b/b.txt": "b"})
    real_scandir = os.scandir

    def refusing_scandir(path: str) -> object:
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", path)
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", refusing_scandir)
    with pytest.raises(DataError, match=r"/b \(from dataset_path\) cannot be read: Permission denied"):
        find_files((folder,), "dataset_path", "text")
