"""Every model YAML against the sizes that its makers published: parameters, order of the layers, experts.

Nothing in the tables is computed by maxlite; `closed_form` counts a second time, from the architecture.
"""

import dataclasses
import functools

import pytest

from maxlite.config.layers import attention_chunk, attention_window, layer_specs
from maxlite.config.load import load_config, model_names
from maxlite.config.schema import Config, ModelConfig
from maxlite.model.build import build_model

# Parameters, and billions of active ones as printed, where somebody prints them.
PUBLISHED = {
    "llama2-7b": (6_738_415_616, ""),
    "llama2-13b": (13_015_864_320, ""),
    "llama2-70b": (68_976_648_192, ""),
    "llama3-8b": (8_030_261_248, ""),
    "llama3-70b": (70_553_706_496, ""),
    "llama3.1-8b": (8_030_261_248, ""),
    "llama3.1-70b": (70_553_706_496, ""),
    "llama3.1-405b": (405_853_388_800, ""),
    "llama3.2-1b": (1_235_814_400, ""),
    "llama3.2-3b": (3_212_749_824, ""),
    "llama3.3-70b": (70_553_706_496, ""),
    "llama4-17b-16e": (107_769_861_120, "17.17"),
    "llama4-17b-16e-instruct": (107_769_861_120, "17.17"),
    "llama4-17b-128e": (400_711_848_960, "17.18"),
    "smollm2-135m": (134_515_008, ""),
    "smollm2-360m": (361_821_120, ""),
    "smollm2-1.7b": (1_711_376_384, ""),
    "gemma-2b": (2_506_172_416, ""),
    "gemma-7b": (8_537_680_896, ""),
    "gemma2-2b": (2_614_341_888, ""),
    "gemma2-9b": (9_241_705_984, ""),
    "gemma2-27b": (27_227_128_320, ""),
    "gemma3-270m": (268_098_176, ""),
    "gemma3-1b": (999_885_952, ""),
    "gemma3-4b": (3_880_263_168, ""),
    "gemma3-12b": (11_766_034_176, ""),
    "gemma3-27b": (27_009_346_304, ""),
    "gemma4-12b": (11_907_350_320, ""),
    "gemma4-26b-a4b": (25_233_141_790, "3.82"),
    "gemma4-31b": (30_697_345_340, ""),
    "mistral-7b-v0.1": (7_241_732_096, ""),
    "mistral-7b-v0.2": (7_241_732_096, ""),
    "mistral-7b-v0.3": (7_248_023_552, ""),
    "mistral-nemo-12b": (12_247_782_400, ""),
    "mistral-small-24b": (23_572_403_200, ""),
    "ministral-8b": (8_019_808_256, ""),
    "mistral-large-123b": (122_610_069_504, ""),
    "mixtral-8x7b": (46_702_792_704, "12.88"),
    "mixtral-8x22b": (140_630_071_296, "39.16"),
    "qwen2.5-0.5b": (494_032_768, ""),
    "qwen2.5-1.5b": (1_543_714_304, ""),
    "qwen2.5-3b": (3_085_938_688, ""),
    "qwen2.5-7b": (7_615_616_512, ""),
    "qwen2.5-14b": (14_770_033_664, ""),
    "qwen2.5-32b": (32_763_876_352, ""),
    "qwen2.5-72b": (72_706_203_648, ""),
    "qwen2-57b-a14b": (57_408_658_944, "14.25"),
    "qwen1.5-moe-a2.7b": (14_315_784_192, "2.7"),
    "qwen3-0.6b": (596_049_920, ""),
    "qwen3-1.7b": (1_720_574_976, ""),
    "qwen3-4b": (4_022_468_096, ""),
    "qwen3-4b-2507": (4_022_468_096, ""),
    "qwen3-8b": (8_190_735_360, ""),
    "qwen3-14b": (14_768_307_200, ""),
    "qwen3-32b": (32_762_123_264, ""),
    "qwen3-30b-a3b": (30_532_122_624, "3.35"),
    "qwen3-30b-a3b-2507": (30_532_122_624, "3.35"),
    "qwen3-235b-a22b": (235_093_634_560, "22.19"),
    "qwen3-235b-a22b-2507": (235_093_634_560, "22.19"),
    "qwen3-coder-480b-a35b": (480_154_875_392, "35"),
    "qwen3-next-80b-a3b": (79_674_391_296, "3.87"),
    "qwen3.5-35b-a3b": (34_660_610_688, "3.45"),
    "qwen3.5-397b-a17b": (396_346_350_336, "17.35"),
    "deepseek2-lite-16b": (15_706_484_224, "2.66"),
    "deepseek2-236b": (235_741_434_880, "21.4"),
    "deepseek3-671b": (671_026_419_200, "37.55"),
    "kimi-k2-1t": (1_026_408_232_448, ""),
    "gpt-oss-20b": (20_914_757_184, "3.6"),
    "gpt-oss-120b": (116_829_156_672, "5.1"),
    "olmo2-1b": (1_484_916_736, ""),
    "olmo2-7b": (7_298_617_344, ""),
    "olmo2-13b": (13_716_198_400, ""),
    "olmo2-32b": (32_234_279_936, ""),
    "olmo3-7b": (7_298_011_136, ""),
    "olmo3-32b": (32_233_522_176, ""),
    "olmoe-1b-7b": (6_919_161_856, "1.28"),
}
# OpenAI's count of active parameters leaves out the embedding, which is only looked up; the others' has it.
ACTIVE_WITHOUT_EMBEDDING = ("gpt-oss-20b", "gpt-oss-120b")

# Kinds of attention, layer by layer: f full, l local, c chunked, n full without positions, m latent,
# g Gated DeltaNet. The rest: all f.
ATTENTION_LAYERS = {
    "llama4-17b-16e": "cccn" * 12,
    "llama4-17b-16e-instruct": "cccn" * 12,
    "llama4-17b-128e": "cccn" * 12,
    "gemma2-2b": "lf" * 13,
    "gemma2-9b": "lf" * 21,
    "gemma2-27b": "lf" * 23,
    "gemma3-270m": "lllllf" * 3,
    "gemma3-1b": "lllllf" * 4 + "ll",
    "gemma3-4b": "lllllf" * 5 + "llll",
    "gemma3-12b": "lllllf" * 8,
    "gemma3-27b": "lllllf" * 10 + "ll",
    "gemma4-12b": "lllllf" * 8,
    "gemma4-26b-a4b": "lllllf" * 5,
    "gemma4-31b": "lllllf" * 10,
    "mistral-7b-v0.1": "l" * 32,
    "ministral-8b": "flll" * 9,
    "qwen3-next-80b-a3b": "gggf" * 12,
    "qwen3.5-35b-a3b": "gggf" * 10,
    "qwen3.5-397b-a17b": "gggf" * 15,
    "deepseek2-lite-16b": "m" * 27,
    "deepseek2-236b": "m" * 60,
    "deepseek3-671b": "m" * 61,
    "kimi-k2-1t": "m" * 61,
    "gpt-oss-20b": "lf" * 12,
    "gpt-oss-120b": "lf" * 18,
    "olmo3-7b": "lllf" * 8,
    "olmo3-32b": "lllf" * 16,
}
# d dense, e experts, b both. The rest: all d.
MLP_LAYERS = {
    "gemma4-26b-a4b": "b" * 30,
    "llama4-17b-16e": "e" * 48,
    "llama4-17b-16e-instruct": "e" * 48,
    "llama4-17b-128e": "de" * 24,
    "mixtral-8x7b": "e" * 32,
    "mixtral-8x22b": "e" * 56,
    "qwen2-57b-a14b": "e" * 28,
    "qwen1.5-moe-a2.7b": "e" * 24,
    "qwen3-30b-a3b": "e" * 48,
    "qwen3-30b-a3b-2507": "e" * 48,
    "qwen3-235b-a22b": "e" * 94,
    "qwen3-235b-a22b-2507": "e" * 94,
    "qwen3-coder-480b-a35b": "e" * 62,
    "qwen3-next-80b-a3b": "e" * 48,
    "qwen3.5-35b-a3b": "e" * 40,
    "qwen3.5-397b-a17b": "e" * 60,
    "deepseek2-lite-16b": "d" + "e" * 26,
    "deepseek2-236b": "d" + "e" * 59,
    "deepseek3-671b": "ddd" + "e" * 58,
    "kimi-k2-1t": "d" + "e" * 60,
    "gpt-oss-20b": "e" * 24,
    "gpt-oss-120b": "e" * 36,
    "olmoe-1b-7b": "e" * 16,
}
# Experts, those that a token is sent to, their width, and the width of the shared one.
EXPERTS = {
    "gemma4-26b-a4b": (128, 8, 704, None),
    "llama4-17b-16e": (16, 1, 8192, 8192),
    "llama4-17b-128e": (128, 1, 8192, 8192),
    "mixtral-8x7b": (8, 2, 14336, None),
    "mixtral-8x22b": (8, 2, 16384, None),
    "qwen2-57b-a14b": (64, 8, 2560, 20480),
    "qwen1.5-moe-a2.7b": (60, 4, 1408, 5632),
    "qwen3-30b-a3b": (128, 8, 768, None),
    "qwen3-235b-a22b": (128, 8, 1536, None),
    "qwen3-coder-480b-a35b": (160, 8, 2560, None),
    "qwen3-next-80b-a3b": (512, 10, 512, 512),
    "qwen3.5-35b-a3b": (256, 8, 512, 512),
    "qwen3.5-397b-a17b": (512, 10, 1024, 1024),
    "deepseek2-lite-16b": (64, 6, 1408, 2 * 1408),
    "deepseek2-236b": (160, 6, 1536, 2 * 1536),
    "deepseek3-671b": (256, 8, 2048, 2048),
    "kimi-k2-1t": (384, 8, 2048, 2048),
    "gpt-oss-20b": (32, 4, 2880, None),
    "gpt-oss-120b": (128, 4, 2880, None),
    "olmoe-1b-7b": (64, 8, 1024, None),
}
LETTERS = {
    "full": "f", "local": "l", "chunked": "c", "nope": "n", "mla": "m", "gated_delta_net": "g", "dense": "d",
    "moe": "e", "dense_and_moe": "b",
}  # fmt: skip
# How far a local layer sees, by family. Where it is one key less or more than published, logits differ.
WINDOWS = {
    "gemma2": 4096, "gemma3-270m": 512, "gemma3-1b": 512, "gemma3": 1024, "gemma4": 1024, "mistral-7b-v0.1": 4096,
    "ministral": 32768, "gpt-oss": 128, "olmo3": 4096,
}  # fmt: skip


def of_family(table, name, default=None):
    """The entry whose key is the longest beginning of `name`."""
    keys = [key for key in table if name.startswith(key)]
    return table[max(keys, key=len)] if keys else default


@functools.cache
def load(name: str) -> Config:
    return load_config("base.yml", [f"model={name}"], {})


def test_every_model_yaml_is_in_the_tables():
    assert set(model_names()) == PUBLISHED.keys()
    assert ATTENTION_LAYERS.keys() | MLP_LAYERS.keys() <= PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters(name):
    parameters, active = PUBLISHED[name]
    config = load(name)
    model = build_model(config.model, config.compute)
    assert model.num_parameters == parameters
    assert (model.num_parameters, model.num_active_parameters) == closed_form(config.model)
    assert (model.num_active_parameters == model.num_parameters) == (name not in MLP_LAYERS)
    if active:
        embedding = config.model.vocab_size * config.model.emb_dim if name in ACTIVE_WITHOUT_EMBEDDING else 0
        decimals = len(active.partition(".")[2])
        assert f"{(model.num_active_parameters - embedding) / 1e9:.{decimals}f}" == active


def closed_form(model: ModelConfig) -> tuple[int, int]:
    """Total and active parameters, from the architecture."""
    dim, layers = model.emb_dim, layer_specs(model)
    outside = model.vocab_size * dim * (1 if model.logits_via_embedding else 2) + dim
    norms = dim * (2 * model.use_pre_norms + 2 * model.use_post_norms)
    total = active = outside + len(layers) * norms
    for layer in layers:
        heads = full_heads(model) if layer.attention == "full" else model
        count = {"mla": latent_attention, "gated_delta_net": delta_net}.get(layer.attention, grouped_attention)
        attention = count(heads)
        attention += model.use_layer_scalar - model.share_kv_projections * (layer.attention == "full") * (
            dim * heads.num_kv_heads * heads.head_dim
        )
        if layer.mlp == "dense":
            everywhere, expert = gated(dim, model.mlp_dim, model.mlp_bias), 0
        else:
            shared = gated(dim, model.shared_expert_mlp_dim or 0, model.mlp_bias) + dim * model.shared_expert_gate
            router = (dim + model.router_bias + model.routed_bias) * model.num_experts
            everywhere = router + (shared if model.shared_expert_mlp_dim else 0)
            everywhere += model.scaled_router * (dim + model.num_experts)
            expert = gated(dim, model.moe_mlp_dim, model.mlp_bias)
        if layer.mlp == "dense_and_moe":
            # Both have a norm before and after, where a layer as a rule has two.
            everywhere += gated(dim, model.mlp_dim, model.mlp_bias) + 3 * dim
        total += attention + everywhere + model.num_experts * expert
        active += attention + everywhere + model.num_experts_per_tok * expert
    return total, active


def gated(dim: int, hidden: int, bias: bool) -> int:
    return 3 * dim * hidden + bias * (2 * hidden + dim)


def full_heads(model: ModelConfig) -> ModelConfig:
    """The same model with the heads of its full layers everywhere."""
    number, width = model.global_num_kv_heads or model.num_kv_heads, model.global_head_dim or model.head_dim
    return dataclasses.replace(model, num_kv_heads=number, head_dim=width)


def grouped_attention(model: ModelConfig) -> int:
    dim, queries = model.emb_dim, model.num_query_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    biases = model.attention_bias * (queries + 2 * keys) + model.attention_out_bias * dim
    norms = {"head": 2 * model.head_dim, "projection": queries + keys, "l2": 0}[model.qk_norm_type] * model.use_qk_norm
    biases += model.attention_output_gate * (dim + model.attention_bias) * queries
    return 2 * dim * (queries + keys) + biases + norms + model.attention_sink * model.num_query_heads


def delta_net(model: ModelConfig) -> int:
    dim, heads = model.emb_dim, model.gdn_num_value_heads
    keys, values = model.gdn_num_key_heads * model.gdn_key_head_dim, heads * model.gdn_value_head_dim
    projections = dim * (2 * keys + values) + dim * values + 2 * dim * heads + values * dim
    # A decay rate and a bias of its step for each memory, and the norm of what it gives.
    return projections + model.gdn_conv_kernel_dim * (2 * keys + values) + 2 * heads + model.gdn_value_head_dim


def latent_attention(model: ModelConfig) -> int:
    dim, heads, rank = model.emb_dim, model.num_query_heads, model.kv_lora_rank
    head = model.qk_nope_head_dim + model.qk_rope_head_dim
    if model.q_lora_rank is None:
        queries = dim * heads * head
    else:
        queries = model.q_lora_rank * (dim + 1 + heads * head)
    keys_values = dim * (rank + model.qk_rope_head_dim) + rank
    expanded = rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return queries + keys_values + expanded + heads * model.v_head_dim * dim


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers(name):
    model = load(name).model
    specs = layer_specs(model)
    found = "".join(LETTERS[spec.attention] for spec in specs)
    assert found == ATTENTION_LAYERS.get(name, "f" * len(specs))
    assert "".join(LETTERS[spec.mlp] for spec in specs) == MLP_LAYERS.get(name, "d" * len(specs))
    experts = (model.num_experts, model.num_experts_per_tok, model.moe_mlp_dim, model.shared_expert_mlp_dim)
    assert experts == of_family(EXPERTS, name, (0, 0, None, None))
    for kind in {spec.attention for spec in specs}:
        assert attention_window(model, kind) == (of_family(WINDOWS, name) if kind == "local" else None)
        assert attention_chunk(model, kind) == (8192 if kind == "chunked" else None)
