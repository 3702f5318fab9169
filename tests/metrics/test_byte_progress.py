import io
import re

import pytest

from maxlite.metrics.byte_progress import ByteProgress


def test_one_line_with_size_and_rate():
    file = io.StringIO()
    with ByteProgress("Read [bold]x", 3_000_000, file) as progress:
        for _ in range(3):
            progress(1_000_000)
    assert re.fullmatch(r"Read \[bold\]x: 3\.0 MB in \d+\.\d\d s \([\d,]+ MB/s\)\n", file.getvalue())


def test_a_failure_leaves_no_line():
    file = io.StringIO()
    with pytest.raises(ValueError), ByteProgress("Read x", 10, file):
        raise ValueError
    assert file.getvalue() == ""
