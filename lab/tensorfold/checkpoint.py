"""A checkpoint and a drafter for the double: published layout and configuration, no weights to speak of."""

import json
import struct
from pathlib import Path

# Where the lab's head has them.
CHECKPOINT_DIR = "/srv/glm53/models/GLM-5.3-Flash-EXL3-double"
DRAFTER_DIR = "/srv/glm53/models/GLM-5.3-Flash-DFlash2-double"
SHARDS = 3
LAYERS = 45

CONFIG: dict[str, object] = {
    "model_type": "glm5_next",
    "text_config": {
        "hidden_size": 4096,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": 3,
        "intermediate_size": 12288,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "index_topk": 2048,
        "index_kpool": 4,
        "hc_mult": 4,
        "num_nextn_predict_layers": 1,
        "vocab_size": 154880,
        "max_position_embeddings": 1048576,
    },
    "quantization_config": {
        "quant_method": "exl3",
        "bits": 4,
        "codebook": "mcg",
        "scope": "glm53_routed_experts_only",
        "head_bits": 16,
        "non_routed_dtype_policy": "official_source_native",
        "version": "0.0.43",
    },
}
DRAFTER_CONFIG: dict[str, object] = {
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
    "sliding_window": 2176,
    "is_causal": False,
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 0,
        "conv_group_size": 1,
        "conv_kernel_size": 2,
        "selector_top_k": 1,
        "target_layer_ids": [1],
    },
}


def write_checkpoint(folder: Path) -> None:
    """Make `folder` a checkpoint that the double takes: a few kB, the shard headers complete and true."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number in range(1, SHARDS + 1):
        shard = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        tensor = f"model.language_model.double.{number}"
        write_shard(folder / shard, tensor)
        weight_map[tensor] = shard
    _write(folder / "config.json", CONFIG)
    _write(folder / "generation_config.json", {"temperature": 1.0, "top_p": 0.95})
    _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_drafter(folder: Path) -> None:
    """Make `folder` a DFlash2 drafter that the double takes."""
    folder.mkdir(parents=True)
    _write(folder / "config.json", DRAFTER_CONFIG)
    write_shard(folder / "model.safetensors", "double")


def write_shard(path: Path, tensor: str) -> None:
    """A safetensors file with one tensor of 32 zeros."""
    size = 64
    header = json.dumps({tensor: {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
