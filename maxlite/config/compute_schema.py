"""The keys of how a model is computed: dtypes, remat, quantization, adapters."""

import dataclasses

from maxlite.config.key import key
from maxlite.config.quant_schema import STORED_TYPES, QuantRules

REMAT_POLICY_NAMES = (
    "none",
    "full",
    "minimal",
    "minimal_with_context",
    "minimal_with_quantization",
    "minimal_with_context_and_quantization",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_with_context_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "custom",
)
# What remat_policy=custom does with a tensor, and the keys that say it, one a tensor.
REMAT_PLACES = ("remat", "device", "offload")
LAYER_INPUT = "decoder_layer_input"
REMAT_TENSORS = (
    "query_proj",
    "key_proj",
    "value_proj",
    "gate_proj",
    "query_wa_proj",
    "kv_wa_proj",
    "context",
    "out_proj",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
    "moe_mlpwo",
)
ATTENTION_KERNELS = ("autoselected", "dot_product", "flash", "cudnn_flash")


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How the model is computed.

    Of these keys weight_dtype, the weight_quant keys and the lora keys change what is stored in a checkpoint.
    """

    dtype: str = key("Dtype of activations.", choices=("auto", "float32", "bfloat16"))
    weight_dtype: str = key("Dtype of parameters.", choices=("float32", "bfloat16"))
    matmul_precision: str = key("Precision of float32 matrix products.", choices=("default", "high", "highest"))
    scan_layers: bool = key("Loop over layers in the compiled program, or unroll them.")
    attention: str = key("Kernel of training's attention.", choices=ATTENTION_KERNELS)
    capacity_factor: float | None = key("Tokens an expert takes of a row, times its share; not set = all.", above=0)
    remat_policy: str = key("What the backward pass keeps of each layer.", choices=REMAT_POLICY_NAMES)
    decoder_layer_input: str = key("custom: where a layer's input waits.", choices=("device", "offload"))
    query_proj: str = key("custom: queries.", choices=REMAT_PLACES)
    key_proj: str = key("custom: keys.", choices=REMAT_PLACES)
    value_proj: str = key("custom: values.", choices=REMAT_PLACES)
    gate_proj: str = key("custom: gate of attention's output.", choices=REMAT_PLACES)
    query_wa_proj: str = key("custom: mla: latent of queries.", choices=REMAT_PLACES)
    kv_wa_proj: str = key("custom: mla: latent of keys and values.", choices=REMAT_PLACES)
    context: str = key("custom: what attention gives.", choices=REMAT_PLACES)
    out_proj: str = key("custom: attention's output matrix.", choices=REMAT_PLACES)
    mlpwi_0: str = key("custom: gate of the MLP.", choices=REMAT_PLACES)
    mlpwi_1: str = key("custom: up of the MLP.", choices=REMAT_PLACES)
    mlpwo: str = key("custom: down of the MLP.", choices=REMAT_PLACES)
    moe_mlpwi_0: str = key("custom: gate of the experts.", choices=REMAT_PLACES)
    moe_mlpwi_1: str = key("custom: up of the experts.", choices=REMAT_PLACES)
    moe_mlpwo: str = key("custom: down of the experts.", choices=REMAT_PLACES)
    num_vocab_tiling: int = key("Tiles of the sequence in the loss; 0 chooses by size.", minimum=0)
    quantization: str | None = key("What products of the layers are rounded to.", choices=("int8", "int4", "fp8"))
    quant_rules: QuantRules | None = key("Rows of how products are rounded, by module path; they come first.")
    weight_quantization: str | None = key("What kernels of the layers are stored as.", choices=STORED_TYPES)
    weight_quant_tile_size: int | None = key("Summed elements that share a stored scale.", minimum=2)
    weight_quant_module_path: str = key("Regular expression of the modules whose kernels are stored so.")
    quantize_kvcache: bool = key("Keys and values are rounded in the cache.")
    kv_quant_axis: str = key("Numbers that share a scale in the cache.", choices=("dkv", "heads_and_dkv"))
    kv_quant_dtype: str = key("What the cache is rounded to.", choices=("int8", "int4"))
    lora_rank: int = key("Rank of the adapters that train instead of the weights; 0 = none.", minimum=0)
    lora_alpha: float = key("Adapters count lora_alpha / lora_rank times.", above=0)
    lora_module_path: str = key("Regular expression of the modules that get an adapter.")
