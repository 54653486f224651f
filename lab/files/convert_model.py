"""Run inside the engine image's tree: turn the GGUF file into safetensors that two ranks can divide.

SmolLM2-135M has 9 query and 3 key/value heads, which no even tensor parallel size divides. Padded with zeros
to 12 and 4 it computes the same: a padded query head attends to a padded key/value head, and its output meets
zero columns.

Usage: convert_model.py FOLDER-OF-GGUF GGUF-NAME TARGET
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

QUERY_HEADS = 12
KEY_VALUE_HEADS = 4


def padded(weight: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """`weight` with zeros appended along `dim` up to `size`."""
    shape = list(weight.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([weight, torch.zeros(shape, dtype=weight.dtype)], dim=dim).contiguous()


def main(source: str, name: str, target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    if (head_dim, group) != (64, QUERY_HEADS // KEY_VALUE_HEADS):
        raise SystemExit(f"{name}: head size {head_dim}, {group} query heads a key/value head; not 64 and 3")
    sizes = {
        "q_proj.weight": (QUERY_HEADS * head_dim, 0),
        "k_proj.weight": (KEY_VALUE_HEADS * head_dim, 0),
        "v_proj.weight": (KEY_VALUE_HEADS * head_dim, 0),
        "o_proj.weight": (QUERY_HEADS * head_dim, 1),
    }
    state = model.state_dict()
    for key, weight in list(state.items()):
        for ending, (size, dim) in sizes.items():
            if key.endswith(ending):
                state[key] = padded(weight, size, dim)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)

    target.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.contiguous() for key, value in state.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config.architectures = [type(model).__name__]
    config.num_attention_heads = QUERY_HEADS
    config.num_key_value_heads = KEY_VALUE_HEADS
    config.head_dim = head_dim
    config.save_pretrained(target)
    text = json.loads((target / "config.json").read_text())
    text.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    if not tokenizer.chat_template:
        raise SystemExit(f"{name}: no chat template in it; the chat API needs one")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
