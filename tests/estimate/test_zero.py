import pytest

from maxlite.estimate.zero import StateBytes, zero_table


def test_the_table_of_the_paper():
    # 7.5 B parameters on 64 devices: 2 bytes of weights, 2 of gradients, 12 of Adam's state each (arXiv:1910.02054).
    count = 7_500_000_000
    rows = zero_table(StateBytes(2 * count, 2 * count, 12 * count), 64)
    assert [row.stage for row in rows] == ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert [row.total / 1e9 for row in rows] == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
