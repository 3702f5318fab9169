from types import SimpleNamespace

import jax
import pytest

from maxlite.errors import ConfigError
from maxlite.metrics.peak import peak_tflops, table_peak


@pytest.mark.parametrize(
    ("device_kind", "tflops"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("TPU v9", None),
        ("cpu", None),
    ],
)
def test_table(device_kind, tflops):
    assert table_peak(device_kind) == tflops


def test_a_number_wins_over_the_table():
    assert peak_tflops("123.5", SimpleNamespace(platform="tpu", device_kind="TPU v4"), "bfloat16") == 123.5


def test_auto_looks_an_accelerator_up():
    assert peak_tflops("auto", SimpleNamespace(platform="tpu", device_kind="TPU v4"), "bfloat16") == 275
    assert peak_tflops("auto", SimpleNamespace(platform="gpu", device_kind="Unheard Of"), "bfloat16") is None


@pytest.mark.parametrize("setting", ["fast", "0", "-3", "nan", "inf", ""])
def test_bad_setting_names_the_key(setting):
    with pytest.raises(ConfigError, match="peak_tflops_per_device="):
        peak_tflops(setting, jax.devices()[0], "float32")


def test_cpu_is_measured_and_shared_by_its_fake_devices(monkeypatch):
    monkeypatch.setattr("maxlite.metrics.peak._MATMUL_SIZE", 256)
    ticks = iter(range(1000))
    monkeypatch.setattr("maxlite.metrics.peak.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))

    # Each matmul is made to last one second.
    per_host = 2 * 256**3 / 1e12
    assert peak_tflops("auto", jax.devices("cpu")[0], "float32") == pytest.approx(per_host / len(jax.devices("cpu")))


def test_cpu_measurement_is_of_a_real_machine():
    whole_host = peak_tflops("auto", jax.devices("cpu")[0], "float32") * len(jax.devices("cpu"))

    assert 0.001 < whole_host < 100
