from maxlite.metrics.log_line import compile_line, eval_line, step_line
from maxlite.metrics.rates import StepTiming, StepWork, eval_tags, step_tags

SCALARS = {
    "loss": 5.5556,
    "lm_loss": 5.5,
    "total_weights": 4096.0,
    "total_tokens": 4096.0,
    "grad_norm": 0.98765,
    "current_learning_rate": 0.004,
}
WORK = StepWork(step_flops=4 * 10**12, padded_tokens=8192, num_devices=2, peak_tflops=8.0)


def test_every_part_in_order():
    tags = step_tags(SCALARS, StepTiming(seconds=0.5, data_wait_seconds=0.0123, hbm_peak_gib=40.25), WORK)

    assert step_line(12, tags, hbm_limit_gib=79.5) == (
        "completed step: 12, seconds: 0.500, TFLOP/s/device: 4.000, Tokens/s/device: 4096.000, total_weights: 4096, "
        "loss: 5.556, lm_loss: 5.500, perplexity: 244.692, MFU: 50.0%, grad_norm: 0.988, lr: 4.000e-03, "
        "data_wait_ms: 12.3, HBM: 40.25/79.50 GiB"
    )


def test_unknown_parts_are_left_out():
    work = StepWork(step_flops=4 * 10**12, padded_tokens=8192, num_devices=2, peak_tflops=None)

    assert step_line(0, step_tags(SCALARS, StepTiming(seconds=0.5, data_wait_seconds=0.0), work)) == (
        "completed step: 0, seconds: 0.500, TFLOP/s/device: 4.000, Tokens/s/device: 4096.000, total_weights: 4096, "
        "loss: 5.556, lm_loss: 5.500, perplexity: 244.692, grad_norm: 0.988, lr: 4.000e-03, data_wait_ms: 0.0"
    )


def test_a_step_that_compiled_shows_no_rates():
    tags = step_tags(SCALARS, StepTiming(seconds=20.0, data_wait_seconds=0.0, compile_seconds=19.0), WORK)

    assert step_line(0, tags).startswith("completed step: 0, seconds: 1.000, total_weights: 4096, loss: 5.556, ")
    assert compile_line("train_step", 19.04) == "compiled train_step in 19.0 s"


def test_evaluation():
    tags = eval_tags(loss_sum=300.0, z_loss_sum=0.05, total_weights=100.0, seconds=1.0)

    assert eval_line(99, tags) == (
        "Completed eval after train step 99, loss=3.000, perplexity=20.086, total_weights=100, avg_z_loss=0.000500"
    )


def test_an_evaluation_of_a_mixture_ends_with_the_loss_of_each_source():
    tags = eval_tags(20.0, 1.0, 10.0, 1.0) | {"eval/avg_loss_code": 1.5, "eval/avg_loss_prose": 2.25}
    assert eval_line(7, tags).endswith("avg_z_loss=0.100000, loss of code=1.500, loss of prose=2.250")
