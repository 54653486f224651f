"""A model directory as the engine sees it at a start: configuration, quantisation, shard headers."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .log import say

EXPERIMENTAL = "EXL3 support is experimental: replies are exact, but speed and memory use may change"
TWO_GPUS = "GLM-5.3-Flash runs on two NVIDIA GPUs with 128 GB each, one rank a GPU"
NATIVE_WINDOW = 1_048_576
SCOPE = "glm53_routed_experts_only"
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
HEADER_LIMIT = 100_000_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose config.json was read; its shards were not looked at."""

    folder: Path
    config: dict[str, Any]

    @property
    def text(self) -> dict[str, Any]:
        """The language model's part of the configuration."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def native_window(self) -> int:
        """max_position_embeddings."""
        return int(self.text.get("max_position_embeddings", NATIVE_WINDOW))

    @property
    def has_mtp_head(self) -> bool:
        return int(self.text.get("num_nextn_predict_layers", 0)) > 0

    def info(self) -> Iterator[str]:
        """The lines of `tensorfold info`."""
        check_quantization(self)
        text, quantization = self.text, self.config["quantization_config"]
        rows = {
            "model_type": self.config["model_type"],
            "family": "GLM-5.3-Flash",
            "engine": "glm5_next (double)",
            "kernels": "none (double)",
            **{
                key: text.get(key, "?")
                for key in (
                    "num_hidden_layers",
                    "hidden_size",
                    "n_routed_experts",
                    "num_experts_per_tok",
                    "vocab_size",
                    "max_position_embeddings",
                )
            },
            "quantization": f"exl3 {quantization['bits']}-bit {quantization['codebook']}",
            "runs on": "two NVIDIA GPUs",
            "sampling": "temperature 1.0, top_p 0.95",
        }
        yield from (f"{label:<24} {value}" for label, value in rows.items())
        yield EXPERIMENTAL
        yield TWO_GPUS

    def announce(self, name: str, rank: int, ranks: int) -> None:
        """The first lines of a start."""
        say(EXPERIMENTAL)
        say(TWO_GPUS)
        say(f"loading {name}: GLM-5.3-Flash (glm5_next) on CUDA, rank {rank} of {ranks}")

    def problem(self) -> str:
        """Why the shards cannot be loaded; empty when every header is readable and every shard complete."""
        try:
            shards = self._shards()
            for shard in shards:
                _check_shard(shard)
        except (OSError, ValueError) as error:
            return str(error)
        return "" if shards else f"no *.safetensors in {self.folder}"

    def _shards(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return [
                self.folder / name
                for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
            ]
        return sorted(self.folder.glob("*.safetensors"))


def _check_shard(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise ValueError(f"{path}: not a complete safetensors header")
        header = json.loads(file.read(length))
    end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
    if size < 8 + length + end:
        raise ValueError(f"{path}: {size} bytes, its header needs {8 + length + end}")


def find_folder(model: str, environ: Mapping[str, str]) -> Path:
    """The directory that MODEL means: itself, or the newest snapshot of a repo id in the cache.

    Raises ValueError for something that is neither, FileNotFoundError for a repo that is not in the cache.
    """
    if Path(model).is_dir():
        return Path(model)
    if not REPO_ID.fullmatch(model):
        raise ValueError(f"{model} is neither a directory nor a Hugging Face repo id (owner/name)")
    snapshot = cached_snapshot(model, environ)
    if snapshot is None:
        raise FileNotFoundError(f"{model} is not in the Hugging Face cache, and the double downloads nothing")
    return snapshot


def cached_snapshot(repo: str, environ: Mapping[str, str]) -> Path | None:
    """A snapshot of the repo in the Hugging Face cache, or None."""
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    try:
        found = sorted((home / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots").iterdir())
    except OSError:
        return None
    return found[-1] if found else None


def read_checkpoint(model: str, environ: Mapping[str, str]) -> Checkpoint:
    """The checkpoint that MODEL means; raises FileNotFoundError or ValueError when it is not one."""
    folder = find_folder(model, environ)
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "glm5_next":
        raise ValueError(
            f"{folder}: model_type {config.get('model_type')!r}; the double knows glm5_next only"
        )
    return Checkpoint(folder, config)


def check_quantization(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless the checkpoint is the one kind that the CUDA engine reads."""
    found = checkpoint.config.get("quantization_config") or {}
    bits, codebook, scope = found.get("bits"), found.get("codebook"), found.get("scope")
    if (found.get("quant_method"), bits, codebook, scope) != ("exl3", 4, "mcg", SCOPE):
        raise ValueError(
            "GLM-5.3-Flash's CUDA engine reads EXL3 checkpoints with 4-bit mcg-codebook routed experts and"
            f" BF16 elsewhere (scope {SCOPE}); this one has bits {bits}, codebook {codebook}, scope {scope}"
        )
