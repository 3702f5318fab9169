"""URLs and chains of them, taken apart and put together."""

import pytest

from maxlite.data.remote_files import file_name, is_url, local_path, url_above, url_below


@pytest.mark.parametrize(
    ("folder", "url"),
    [
        ("gs://bucket/dir", "gs://bucket/dir/a.jsonl.gz"),
        ("https://host", "https://host/a.jsonl.gz"),
        ("memory:///dir", "memory:///dir/a.jsonl.gz"),
        ("zip://dir::gs://bucket/all.zip", "zip://dir/a.jsonl.gz::gs://bucket/all.zip"),
        ("simplecache::s3://bucket/dir", "simplecache::s3://bucket/dir/a.jsonl.gz"),
    ],
)
def test_down_and_up(folder: str, url: str) -> None:
    assert url_below(folder, "a.jsonl.gz") == url
    assert url_above(url) == folder
    assert file_name(url) == "a.jsonl.gz"


def test_an_archive_itself() -> None:
    assert url_below("zip://::all.zip", "a") == "zip://a::all.zip"
    assert url_above("zip://a::all.zip") == "zip://::all.zip"


def test_a_web_address_with_a_question() -> None:
    assert file_name("https://host/a.jsonl.gz?download=true") == "a.jsonl.gz"
    assert file_name("/dir/a.jsonl?") == "a.jsonl?"


def test_which_are_local() -> None:
    assert local_path("file:///dir/a") == local_path("local:///dir/a") == "/dir/a"
    assert local_path("gs://dir/a") is None and local_path("file://a.zip::b") is None
    assert is_url("zip://a::b.zip") and not is_url("/dir/a") and not is_url("C:/a")
