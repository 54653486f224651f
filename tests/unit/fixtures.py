"""Settings of both engines as data, whose values differ from the defaults, and places to run a rank at."""

from __future__ import annotations

from typing import Any

import yaml

from glm53_service.engines.base import Launch, Place
from glm53_service.fabric.rails import Fabric, Rail
from glm53_service.settings import Settings, load_settings

LICENCE = {"accepted_by": "Ada Example", "accepted_on": "2026-10-03", "use": "non-commercial"}
DRAFTER_DIR = "/srv/models/dflash2"
SHA = "ab" * 32


def merged(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with `changes`, section by section."""
    both = dict(data)
    for key, value in changes.items():
        both[key] = {**both[key], **value} if isinstance(value, dict) and key in both else value
    return both


def tensorfold_data(**changes: Any) -> dict[str, Any]:
    """Return settings.yaml of TensorFold on Sparks."""
    data: dict[str, Any] = {
        "version": 1,
        "cluster": "unit",
        "engine": "tensorfold",
        "image": "unit/tensorfold@sha256:" + "7" * 64,
        "model": {"path": "/srv/models/glm", "name": "unit-glm"},
        "api": {"port": 18888},
        "supervision": {"min_free_gib": 3, "stop_grace_seconds": 7},
    }
    return merged(data, changes)


def with_dflash2(**changes: Any) -> dict[str, Any]:
    """Return TensorFold's settings with an accepted licence and a pinned drafter."""
    drafter = {"path": DRAFTER_DIR, "sha256": SHA, "licence": LICENCE}
    return merged(tensorfold_data(drafter=drafter), changes)


def vllm_data(**changes: Any) -> dict[str, Any]:
    """Return settings.yaml of vLLM on Sparks."""
    return merged(tensorfold_data(engine="vllm", image="unit/vllm-exl3@sha256:" + "7" * 64), changes)


def settings_of(data: dict[str, Any]) -> Settings:
    """Return the settings in `data`, read as the file is."""
    return load_settings(yaml.safe_dump(data), "settings.yaml")


def place(rank: int, *, rails: int = 2) -> Place:
    """Return where `rank` runs, with names and GID index of its own."""
    found = tuple(
        Rail(
            netdev=f"f{rank}{number}",
            address=f"192.0.{number}.{rank + 1}",
            mtu=9000,
            hca=f"roce{rank}{number}",
            gid_index=3 + rank,
        )
        for number in range(rails)
    )
    return Place(
        rank=rank,
        management="203.0.113.5",
        fabric=Fabric(rails=found),
        uid=991,
        gid=992,
        cache="/var/lib/glm53/cache/abc",
    )


def launch_of(settings: Settings, **more: Any) -> Launch:
    """Return the launch of epoch 12."""
    return Launch(epoch=12, settings=settings, image_content="sha256:x", master="192.0.0.1", world=2, **more)


def value(command: tuple[str, ...], flag: str) -> str:
    """Return the value after `flag`."""
    return command[command.index(flag) + 1]
