"""Says whether two docker images are the same image.

An image's Id is no answer: it holds the creation time, and the containerd store computes it differently from
overlay2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

LOCAL_REPOSITORY = "glm53/engine"
LOCAL_TAG_DIGITS = 12
CONFIG_KEYS = ("Cmd", "Entrypoint", "Env", "User", "WorkingDir")


def image_content(inspect: Mapping[str, Any]) -> str:
    """Return `sha256:<hex>` over what `docker image inspect` says will run: layers, architecture,
    configuration.

    Equal content gives equal values on every node, whatever store its docker uses. An empty list and an
    absent key count as the same: docker versions differ in which one they write.
    """
    config = inspect.get("Config") or {}
    facts = {
        "architecture": inspect.get("Architecture", ""),
        "layers": (inspect.get("RootFS") or {}).get("Layers") or [],
        "config": {key: config.get(key) or None for key in CONFIG_KEYS},
    }
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def local_tag(content: str) -> str:
    """Return the tag under which an image of `content` travels and is found on a worker.

    A digest reference does not survive `docker save` and `docker load`; a tag made of the content does, and
    cannot lie about it.
    """
    return f"{LOCAL_REPOSITORY}:{content.removeprefix('sha256:')[:LOCAL_TAG_DIGITS]}"
