"""Which kernel each kind of attention of a model runs on, and why."""

from jax.sharding import Mesh

from maxlite.config.layers import attention_chunk, attention_head_dim, attention_window, layer_specs
from maxlite.config.schema import Config, ModelConfig
from maxlite.errors import ConfigError
from maxlite.ops.attention_choice import AttentionFacts, KernelChoice, choose_kernel
from maxlite.ops.attention_types import AttentionOptions, ContextParallel
from maxlite.parallel.sharding import describe_axes, mesh_axes, num_parts


def choose_kernels(config: Config, dtype: str, mesh: Mesh) -> dict[str, KernelChoice]:
    """Returns the kernel of each kind of attention in the model that has scores.

    dtype: of activations, resolved.

    Raises:
        ConfigError: a kernel cannot do what this model or mesh asks of it, or a kind cannot be cut over the length.
    """
    axes = mesh_axes("length", config.parallel.logical_axis_rules)
    cut = num_parts(axes, mesh) > 1
    parallel = config.parallel
    context = ContextParallel(parallel.context_parallel_strategy, parallel.context_parallel_load_balance)
    device = mesh.devices.flat[0]
    choices = {}
    for kind in dict.fromkeys(spec.attention for spec in layer_specs(config.model)):
        if kind != "gated_delta_net":
            facts = _facts(config.model, kind, dtype, config.data.max_target_length, context if cut else None)
            capability = getattr(device, "compute_capability", None)
            choices[kind] = choose_kernel(config.compute.attention, device.platform, facts, capability)
        elif cut:
            raise ConfigError(
                f"attention_pattern has gated_delta_net layers, which read a row from its beginning, and "
                f"{describe_axes(axes, mesh)} cuts rows into parts; set ici_context_parallelism=1."
            )
    return choices


def _facts(model: ModelConfig, kind: str, dtype: str, length: int, context: ContextParallel | None) -> AttentionFacts:
    latent = kind == "mla"
    width = attention_head_dim(model, kind)
    soft_cap = None if latent else model.attn_logits_soft_cap
    options = AttentionOptions(1.0, attention_window(model, kind), attention_chunk(model, kind), soft_cap)
    values = model.v_head_dim if latent and model.v_head_dim is not None else width
    return AttentionFacts(options, dtype, (width, values), length, model.attention_sink and not latent, context)


def kernel_lines(choices: dict[str, KernelChoice]) -> list[str]:
    """Returns one line for each choice: which kinds of attention run on which kernel, and why."""
    return [
        f"Attention of {', '.join(kind for kind in choices if choices[kind] == choice)} layers: {choice.kernel} "
        f"({choice.reason})"
        for choice in dict.fromkeys(choices.values())
    ]
