"""The DFlash2 drafter: what the engine reads of it, and how its loading fails."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint import REPO_ID, cached_snapshot

REPO = "incoai/GLM-5.3-Flash-DFlash2"
FILES = ("config.json", "model.safetensors")
KEYS = (
    "hidden_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_hidden_layers",
    "rms_norm_eps",
    "sliding_window",
    "is_causal",
)
DFLASH_KEYS = (
    "block_size",
    "mask_token_id",
    "conv_group_size",
    "conv_kernel_size",
    "selector_top_k",
    "target_layer_ids",
)


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter that is to be loaded."""

    folder: Path

    def load(self, *, fails: bool) -> None:
        """Read its configuration; a key that is missing is a KeyError, which nothing catches."""
        config = json.loads((self.folder / "config.json").read_text())
        for key in KEYS:
            config[key]
        for key in DFLASH_KEYS:
            config["dflash_config"][key]
        config["rope_parameters"]["rope_theta"]
        if fails:
            raise RuntimeError(f"DFlash2 draft model {self.folder}: the weights do not fit the configuration")


def find_drafter(wanted: str, environ: Mapping[str, str]) -> Drafter | None:
    """The drafter that --drafter means; None for `none` and for `auto` without a complete one in the cache.

    Raises FileNotFoundError for one that is named and not complete.
    """
    if wanted == "none":
        return None
    if wanted == "auto":
        snapshot = cached_snapshot(REPO, environ)
        return Drafter(snapshot) if snapshot is not None and not _missing(snapshot) else None
    folder: Path | None = Path(wanted)
    if not Path(wanted).is_dir() and REPO_ID.fullmatch(wanted):
        folder = cached_snapshot(wanted, environ)
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(f"drafter {wanted} is neither a directory nor a repo in the cache")
    if missing := _missing(folder):
        raise FileNotFoundError(f"drafter {folder} has no {' and no '.join(missing)}")
    return Drafter(folder)


def _missing(folder: Path) -> list[str]:
    return [name for name in FILES if not (folder / name).is_file()]
