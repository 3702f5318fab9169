"""All families. A new one of known parts is a table in family_dense.py or family_experts.py, and its name here."""

from maxlite.hf.family_dense import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    OLMO2,
    OLMO3,
    QWEN2,
    QWEN3,
)
from maxlite.hf.family_experts import DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, LLAMA4, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from maxlite.hf.family_gemma4 import GEMMA4, GEMMA4_UNIFIED
from maxlite.hf.family_lines import Family
from maxlite.hf.family_qwen3_next import QWEN3_NEXT

# In this order: a model that several of them can express is written as the first.
FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GEMMA4_UNIFIED,
    OLMO2,
    OLMO3,
    MINISTRAL,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    OLMOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    LLAMA4,
    GPT_OSS,
)
BY_MODEL_TYPE: dict[str, Family] = {
    name: family for family in FAMILIES for name in (family.model_type, *family.aliases)
}
BY_WRAPPER: dict[str, Family] = {family.wrapper: family for family in FAMILIES if family.wrapper is not None}
