from maxlite.checkpoint.report import RestoreReport


def test_all_that_can_be_said():
    report = RestoreReport(
        restored=("params/a", "params/b", "params/c"),
        cast={
            "params/a": ("float32", "bfloat16"),
            "params/c": ("float32", "bfloat16"),
            "params/b": ("float32", "int8"),
        },
        not_used=("opt_state/0", "opt_state/1", "step"),
        num_bytes=1_500_000_000,
        seconds=0.5,
    )
    assert report.line() == (
        "Restored 3 arrays, 1.50 GB in 0.50 s (3.00 GB/s); cast 2 arrays from float32 to bfloat16; "
        "cast 1 array from float32 to int8; not read: opt_state (2 arrays), step (1 array)"
    )


def test_what_is_not_there_is_not_said():
    assert RestoreReport(("step",), {}, (), 4, 0.004).line() == "Restored 1 array, 0.00 MB in 0.00 s (0.00 GB/s)"
