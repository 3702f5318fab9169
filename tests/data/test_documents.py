"""Which files are documents, which are passed over, which are held out, and what cannot be used at all."""

import builtins
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from maxlite.data.documents import Document, find_documents, hold_out, read_bytes
from maxlite.errors import DataError

WriteFiles = Callable[..., str]


def names(path: str | tuple[str, ...]) -> list[str]:
    """Returns the names of the documents under a path."""
    paths = (path,) if isinstance(path, str) else path
    return [document.name for document in find_documents(paths, "dataset_path").found]


def test_folder_is_searched_in_name_order_without_hidden_files(write_files: WriteFiles) -> None:
    """Depth does not matter; hidden files and folders are left out."""
    folder = write_files({"b.txt": "b", "a/z.md": "z", "a/b/c": "c", ".hidden": "h", ".git/config": "g", "a.txt": "a"})
    assert names(folder) == ["a.txt", "a/b/c", "a/z.md", "b.txt"]


def test_glob_file_and_list(write_files: WriteFiles) -> None:
    """Names are below the part of a glob before its first wildcard; a file that is named twice counts once."""
    folder = write_files({"x/a.txt": "a", "x/b.md": "b", "y/a.txt": "c"})
    assert names(f"{folder}/*/a.txt") == ["x/a.txt", "y/a.txt"]
    assert names(f"{folder}/**/*.md") == ["x/b.md"]
    assert names(f"{folder}/x/b.md") == ["b.md"]
    assert names((f"{folder}/y", f"{folder}/x/*.md", folder)) == ["a.txt", "b.md", "x/a.txt"]


def test_a_file_whose_name_looks_like_a_glob(write_files: WriteFiles) -> None:
    """What exists is taken by its name."""
    assert names(write_files({"a[1].txt": "a", "a1.txt": "b"}) + "/a[1].txt") == ["a[1].txt"]


def test_home_is_expanded(write_files: WriteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """~ means the home folder, as in a shell."""
    monkeypatch.setenv("HOME", write_files({"a.txt": "a"}))
    assert names("~/a.txt") == ["a.txt"]


def test_odd_files_are_counted_and_passed_over(write_files: WriteFiles) -> None:
    """Empty and binary files are skipped; white space is text (P35)."""
    folder = write_files(
        {
            "binary": b"\x7fELF\x00\x01",
            "empty": "",
            "latin1": "caf\xe9".encode("latin-1"),
            "cut_short": "€".encode()[:2],
            "utf16": "text".encode("utf-16"),
            "white": " \n\t ",
            "word": "word",
        }
    )
    documents = find_documents((folder,), "dataset_path")
    assert [document.name for document in documents.found] == ["white", "word"]
    assert (documents.num_empty, documents.num_not_text) == (1, 4)


def test_a_character_across_the_end_of_the_probe_is_text(write_files: WriteFiles) -> None:
    """Only the first 4096 bytes are looked at; where they end within a character, that is no fault."""
    folder = write_files({f"{shift}.txt": "a" * shift + "€" * 2000 for shift in range(3)})
    assert len(names(folder)) == 3


def test_a_pipe_does_not_block(write_files: WriteFiles) -> None:
    """Something that is not a file is passed over, never opened."""
    folder = write_files({"a.txt": "a"})
    os.mkfifo(f"{folder}/pipe")
    assert names(folder) == ["a.txt"]


def test_links_are_followed_once(write_files: WriteFiles) -> None:
    """A linked folder is part of the data; one that leads back to itself ends; a file counts once."""
    elsewhere = write_files({"c.txt": "c"}, folder="elsewhere")
    folder = write_files({"a.txt": "a", "b/b.txt": "b"})
    os.symlink(elsewhere, f"{folder}/linked")
    os.symlink(folder, f"{folder}/b/back")
    os.symlink(f"{folder}/a.txt", f"{folder}/z.txt")
    assert names(folder) == ["a.txt", "b/b.txt", "linked/c.txt"]


def test_default_is_the_standard_library() -> None:
    """Python's own sources, without what pip installed and without caches."""
    found = [document.name for document in find_documents(None, "dataset_path").found]
    assert "json/decoder.py" in found
    assert all(name.endswith(".py") and "site-packages" not in name for name in found)
    assert len(found) > 300


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({"a": "a"}, "missing", "missing does not exist"),
        ({"a": "a"}, "*.parquet", "parquet matches no file"),
        ({"x/a": "a", "y/.b": "b"}, "y", "y holds no text: 0 empty files, 0 files that are not"),
        ({"a": "", "b": ""}, "", "holds no text: 2 empty files"),
        ({"a": b"\0"}, "a", "1 files that are not UTF-8"),
    ],
)
def test_paths_that_hold_nothing(write_files: WriteFiles, files: dict[str, str], path: str, message: str) -> None:
    """Each is an error with exit code 3 that names the key and the path."""
    folder = write_files(files)
    with pytest.raises(DataError, match=message) as raised:
        find_documents((os.path.join(folder, path),), "eval_dataset_path")
    assert "eval_dataset_path" in str(raised.value) and folder in str(raised.value)
    assert raised.value.exit_code == 3


def test_unreadable_file_and_dangling_link(write_files: WriteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the file and the reason."""
    folder = write_files({"a.txt": "a", "b.txt": "b"})
    real_open = builtins.open

    def refusing_open(file: str, *arguments: object, **options: object) -> object:
        if str(file).endswith("b.txt"):
            raise PermissionError(13, "Permission denied", file)
        return real_open(file, *arguments, **options)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", refusing_open)
        with pytest.raises(DataError, match=r"b\.txt .*cannot be read: Permission denied"):
            find_documents((folder,), "dataset_path")
    os.symlink(f"{folder}/nowhere", f"{folder}/link")
    with pytest.raises(DataError, match=r"link .*cannot be read: No such file"):
        find_documents((folder,), "dataset_path")


def documents_named(*document_names: str) -> tuple[Document, ...]:
    """Returns documents of ten bytes that have no files."""
    return tuple(Document(f"/{name}", name, 0, 10, 10) for name in document_names)


def test_held_out_share_and_stability() -> None:
    """About the asked share is held out, and adding documents moves none of the old ones."""
    few = documents_named(*(f"folder/{index}.txt" for index in range(500)))
    more = few + documents_named(*(f"new/{index}.txt" for index in range(500)))
    train, held_out = hold_out(few, 0.2)
    assert set(train) | set(held_out) == set(few) and not set(train) & set(held_out)
    assert 70 <= len(held_out) <= 130
    assert [document for document in hold_out(more, 0.2)[1] if document in few] == list(held_out)


@pytest.mark.parametrize("fraction", [0.0001, 0.9])
@pytest.mark.parametrize("document_names", [("a", "b"), ("c", "d"), ("same", "same")])
def test_two_documents_give_one_to_each_side(document_names: tuple[str, str], fraction: float) -> None:
    """However small or large the share."""
    train, held_out = hold_out(documents_named(*document_names), fraction)
    assert (len(train), len(held_out)) == (1, 1)


def test_no_share_holds_nothing_out() -> None:
    """A fraction of 0 trains on everything."""
    documents = documents_named("a", "b")
    assert hold_out(documents, 0.0) == (documents, ())


@pytest.mark.parametrize(
    ("text", "fraction", "front", "back"),
    [
        ("0123456789" * 10, 0.05, "0123456789" * 9 + "01234", "56789"),
        ("ab", 0.01, "a", "b"),
        ("a", 0.5, "a", None),
        ("aaaaaaa🐍b", 0.25, "aaaaaaa", "🐍b"),
        ("🐍", 0.5, "🐍", None),
    ],
)
def test_a_lone_file_gives_its_end(
    write_files: WriteFiles, text: str, fraction: float, front: str, back: str | None
) -> None:
    """The cut never goes through a character; what has one character only is not cut."""
    documents = find_documents((write_files({"one.txt": text}),), "dataset_path").found
    parts = hold_out(documents, fraction)
    texts = [[read_bytes(document, 0, document.num_bytes).decode() for document in part] for part in parts]
    assert texts == [[front], [] if back is None else [back]]


def test_files_that_change_under_a_run(write_files: WriteFiles) -> None:
    """Grown, cut or gone: an error that names the file."""
    folder = write_files({"a.txt": "hello"})
    (document,) = find_documents((folder,), "dataset_path").found
    assert read_bytes(document, 1, 3) == b"ell"
    for content in ("hello more", "he"):
        Path(document.path).write_text(content)
        with pytest.raises(DataError, match=rf"a\.txt had 5 bytes .* has {len(content)} now"):
            read_bytes(document, 1, 3)
    Path(document.path).unlink()
    with pytest.raises(DataError, match=r"a\.txt .*cannot be read now"):
        read_bytes(document, 1, 3)
