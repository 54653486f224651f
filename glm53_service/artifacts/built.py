"""Names an image that the head built by what it was built of, so that a changed input is another image."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

BUILT_REPOSITORY = "glm53/built"
TAG_DIGITS = 12
REFERENCE = re.compile(rf"^{BUILT_REPOSITORY}:[0-9a-f]{{{TAG_DIGITS}}}$")
INPUTS_LABEL = "glm53.inputs"
BUILT_OF_LABEL = "glm53.built-of"
"""Labels of a built image: the hash of all inputs, and each input's own, so that a change can be named."""

Inputs = Mapping[str, str]
"""What an image is built of: `base`, `version`, `patches/NAME` ... and the value or the hash of each."""


def inputs_hash(inputs: Inputs) -> str:
    """Return the SHA-256 over all inputs, whatever their order."""
    return hashlib.sha256(json.dumps(dict(inputs), sort_keys=True).encode()).hexdigest()


def built_reference(inputs: Inputs) -> str:
    """Return the name of the image that these inputs make."""
    return f"{BUILT_REPOSITORY}:{inputs_hash(inputs)[:TAG_DIGITS]}"


def built_labels(inputs: Inputs) -> dict[str, str]:
    """Return the labels by which the image is known again."""
    return {INPUTS_LABEL: inputs_hash(inputs), BUILT_OF_LABEL: json.dumps(dict(inputs), sort_keys=True)}


def drift(labels: Mapping[str, str] | None, inputs: Inputs) -> tuple[str, ...]:
    """Return why an image with these labels is not the one that `inputs` make, an input a line; () if it
    is.
    """
    found = dict(labels or {})
    if found.get(INPUTS_LABEL) == inputs_hash(inputs):
        return ()
    try:
        was = {str(key): str(value) for key, value in json.loads(found.get(BUILT_OF_LABEL, "")).items()}
    except (ValueError, AttributeError):
        return (f"the image has no label {BUILT_OF_LABEL}: it was not built for glm53_image_build",)
    reasons = [
        _reason(key, was.get(key), inputs.get(key))
        for key in sorted({*was, *inputs})
        if was.get(key) != inputs.get(key)
    ]
    return tuple(reasons) or (f"the image's label {INPUTS_LABEL} is not that of its own inputs",)


def _reason(key: str, was: str | None, now: str | None) -> str:
    what, _, name = key.partition("/")
    subject = f"{what}: {name}" if name else what
    if was is None:
        return f"{subject} was added since the image was built"
    if now is None:
        return f"{subject} was taken away since the image was built"
    shown = f" ({was}, now {now})" if what in ("base", "engine", "version") else ""
    return f"{subject} changed since the image was built{shown}"
