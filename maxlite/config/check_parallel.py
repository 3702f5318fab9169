"""Rules between how a step is spread over devices and what it computes."""

from collections.abc import Iterator

from maxlite.config.layers import has_experts
from maxlite.config.schema import LEVELS, MESH_AXES, Config


def check_capacity(config: Config) -> Iterator[str]:
    """Tokens are dropped row by row, so a row must be whole."""
    given = _degrees(config, "context")
    if config.compute.capacity_factor is not None and given:
        yield (
            f"capacity_factor={config.compute.capacity_factor:g} drops tokens in the order of their row, which {given} "
            "cuts into parts; set capacity_factor=null (no token is dropped), or that degree to 1."
        )


def check_router_keys(config: Config) -> Iterator[str]:
    """A balance that is asked for can act."""
    train, model = config.train, config.model
    if train.routed_bias_update_rate and not model.routed_bias:
        yield (
            f"routed_bias_update_rate={train.routed_bias_update_rate:g} moves a bias that this model does not have; "
            "set it to 0, or routed_bias=true."
        )
    if train.load_balance_loss_weight and not has_experts(model):
        yield (
            f"load_balance_loss_weight={train.load_balance_loss_weight:g} needs experts, and mlp_pattern has none; "
            "set it to 0."
        )


def check_stages(config: Config) -> Iterator[str]:
    """Keys of the pipeline come with stages."""
    if config.parallel.num_pipeline_microbatches is not None and not _degrees(config, "pipeline"):
        yield (
            f"num_pipeline_microbatches={config.parallel.num_pipeline_microbatches} needs stages; give "
            "ici_pipeline_parallelism (or dcn_), or leave it out."
        )


def check_compile(config: Config) -> Iterator[str]:
    """Slices are counted where there is a topology."""
    given = config.compile
    if given.compile_topology_num_slices > 1 and given.compile_topology is None:
        yield (
            f"compile_topology_num_slices={given.compile_topology_num_slices} counts slices of compile_topology, which "
            "is not set; give it, for example compile_topology=v5e-16."
        )
    if given.compile_topology is not None and config.run.cpu_devices:
        yield (
            f"compile_topology={given.compile_topology} and cpu_devices={config.run.cpu_devices} name two sets of "
            "devices; give one."
        )


def _degrees(config: Config, word: str) -> str:
    """The degrees of an axis that are not 1, for a message; empty if there are none."""
    names = [f"{level}_{word}_parallelism" for level in LEVELS]
    assert word == "pipeline" or word in MESH_AXES
    given = {name: getattr(config.parallel, name) for name in names}
    return ", ".join(f"{name}={degree}" for name, degree in given.items() if degree != 1)


PARALLEL_CHECKS = (check_capacity, check_router_keys, check_stages, check_compile)
