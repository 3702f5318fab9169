import pytest

from maxlite.data.json_files import read_json, write_json
from maxlite.errors import ConfigError, ConversionError


def test_what_is_written_is_read(tmp_path):
    content = {"text": "Grüße 世界", "list": [1, None, {"a": 0.5}]}
    write_json(tmp_path / "x.json", content)
    assert read_json(tmp_path / "x.json", ConfigError) == content
    assert (tmp_path / "x.json").read_text(encoding="utf-8").startswith('{\n  "text": "Grüße 世界"')


@pytest.mark.parametrize("error", [ConfigError, ConversionError])
@pytest.mark.parametrize(
    ("text", "words"), [("{", "JSON"), ("[1]", "object, not list"), ("[" * 100_000, "JSON"), (None, "JSON")]
)
def test_what_is_no_object_is_the_callers_error(text, words, error, tmp_path):
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    with pytest.raises(error, match=f"x.json.*{words}"):
        read_json(tmp_path / "x.json", error)
