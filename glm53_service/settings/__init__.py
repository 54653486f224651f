"""What the head is asked to serve: `/etc/glm53/settings.yaml`, typed and validated.

Only the head has this file; a start carries its content to the followers, so the ranks cannot differ in it.
Unknown keys are errors. Every default is stated in this package and nowhere else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from glm53_service.artifacts.built import REFERENCE, built_reference
from glm53_service.drafter import Choice, DrafterKind, DrafterSettings, Files, Refusal, choose
from glm53_service.errors import ConfigError
from glm53_service.settings.common import (
    Api,
    CanarySettings,
    Count,
    Gate,
    Model,
    Port,
    Seconds,
    Source,
    Supervision,
    canary_problems,
    long_lines,
    supervision_problems,
    supervision_warnings,
)
from glm53_service.settings.tensorfold import Media, Tensorfold, tensorfold_problems, tensorfold_warnings
from glm53_service.settings.vllm import (
    CUDA_DEFAULTS,
    RENAMED,
    Ablation,
    Vllm,
    vllm_problems,
    vllm_warnings,
)
from glm53_service.structs import decode, load_yaml

__all__ = [
    "Ablation",
    "Api",
    "CanarySettings",
    "Count",
    "Gate",
    "Media",
    "Model",
    "Port",
    "Seconds",
    "Settings",
    "Source",
    "Supervision",
    "Tensorfold",
    "Vllm",
    "choose_drafter",
    "dump",
    "load_settings",
    "long_lines",
    "pair_problems",
    "read_settings",
    "read_text",
    "settings_from",
    "warnings",
]


PINNED = re.compile(r"^(\S+@)?sha256:[0-9a-f]{64}$")
"""An image that cannot change: by digest, or by the id of a local build."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of settings.yaml. Of `vllm` and `tensorfold` only the chosen engine's part has an effect.

    `image_inputs` is what the head built the image of, from which the image has its name; empty: it did not.
    """

    version: Literal[1]
    cluster: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]
    engine: Literal["tensorfold", "vllm"] = "tensorfold"
    device: Literal["cuda", "cpu"] = "cuda"
    image: Annotated[str, Meta(pattern=r"^\S+$")]
    image_inputs: dict[str, str] = {}
    model: Model
    api: Api = Api()
    gate: Gate = Gate()
    canary: CanarySettings = CanarySettings()
    drafter: DrafterSettings = DrafterSettings()
    tensorfold: Tensorfold = Tensorfold()
    vllm: Vllm = Vllm()
    supervision: Supervision = Supervision()

    @property
    def rendezvous_port(self) -> int:
        """Where the chosen engine's ranks meet, on rank 0's fabric address."""
        return self.vllm.rendezvous_port if self.engine == "vllm" else self.tensorfold.rendezvous_port

    @property
    def window(self) -> int | None:
        """The asked window of prompt and reply in tokens; None where the engine is to find it."""
        asked = self.vllm.max_model_len if self.engine == "vllm" else self.tensorfold.context
        return asked if isinstance(asked, int) and asked else None


def load_settings(text: str, source: str) -> Settings:
    """Return the settings in YAML `text`; ConfigError lists every fault (key, found, expected, fix)."""
    return settings_from(load_yaml(text, source), source)


def settings_from(data: dict[str, Any], source: str) -> Settings:
    """Return the settings in `data` (as a start message carries them); errors as load_settings."""
    renamed = _renamed(data)
    if renamed:
        raise ConfigError(source, renamed)
    settings = decode(Settings, _with_device_defaults(data), source)
    problems = _cross_checks(settings)
    if problems:
        raise ConfigError(source, problems)
    return settings


def read_settings(etc: Path) -> Settings:
    """Return the settings of this node's `etc` folder; ConfigError when absent or wrong."""
    return load_settings(read_text(etc / "settings.yaml"), str(etc / "settings.yaml"))


def read_text(path: Path) -> str:
    """Return the text of a configuration file; ConfigError when it is absent or unreadable."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        hint = (
            "run this with sudo"
            if isinstance(error, PermissionError)
            else "run site.yml: it writes this file"
        )
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"], hint=hint) from None


def dump(settings: Settings) -> dict[str, Any]:
    """Return `settings` as plain data, every default written out."""
    data: dict[str, Any] = msgspec.to_builtins(settings)
    return data


def choose_drafter(
    settings: Settings, *, files: Files = None, mtp_head: bool | None = None
) -> Choice | Refusal:
    """Return what a start of these settings drafts with.

    `files` are what each rank found in the drafter's folder, `mtp_head` whether the checkpoint has one; None:
    not looked at. Validated settings are never refused for themselves, only for what is found.
    """
    return choose(
        settings.drafter,
        engine=settings.engine,
        device=settings.device,
        parallel=_parallel(settings),
        files=files,
        mtp_head=mtp_head,
    )


def pair_problems(settings: Settings, nodes: int) -> tuple[str, ...]:
    """Return why these settings cannot be served by so many nodes."""
    if settings.device == "cpu" or nodes == 2:
        return ()
    return (
        f"nodes: found {nodes}, expected 2 with {settings.engine} on Sparks: this checkpoint and these"
        " kernels are split in two. Fix: two nodes in the inventory",
    )


def warnings(settings: Settings) -> tuple[str, ...]:
    """Return what is allowed, and is known to hurt or to have no effect; each begins with its key."""
    found = []
    for engine, part, default in (
        ("vllm", settings.vllm, _defaults(settings)),
        ("tensorfold", settings.tensorfold, Tensorfold()),
    ):
        if engine != settings.engine and part != default:
            found.append(f"{engine}: set, but the engine is {settings.engine}: no effect")
    choice = choose_drafter(settings)
    if isinstance(choice, Refusal):
        return tuple(found)
    if choice.kind is DrafterKind.DFLASH2 and settings.drafter.sha256 is None:
        found.append(
            "drafter.sha256: not set; every node must have the head's weights, whatever they are. Different"
            " weights have been published under the drafter's name"
        )
    if settings.engine == "tensorfold":
        found += tensorfold_warnings(
            settings.tensorfold, choice.kind, choice.parallel, device=settings.device
        )
        if settings.tensorfold.vision_urls and settings.api.bind == "management":
            found.append(
                "tensorfold.vision_urls: true with an open API; whoever reaches it can have the head fetch"
                " any public address"
            )
    elif settings.device == "cuda":
        found += vllm_warnings(settings.vllm, choice.kind)
    if settings.device == "cuda":
        found += supervision_warnings(settings.supervision)
    return tuple(found)


def _parallel(settings: Settings) -> int | None:
    if settings.engine == "vllm":
        return settings.vllm.max_num_seqs
    return None if settings.tensorfold.parallel == "auto" else settings.tensorfold.parallel


def _defaults(settings: Settings) -> Vllm:
    return Vllm(**CUDA_DEFAULTS) if settings.engine == "vllm" and settings.device == "cuda" else Vllm()


def _renamed(data: dict[str, Any]) -> list[str]:
    part = data.get("vllm")
    if not isinstance(part, dict):
        return []
    return [f"vllm.{key}: {text}" for key, text in RENAMED.items() if key in part]


def _with_device_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with the recipe's values where a Spark's vLLM has nothing said."""
    part = data.get("vllm", {})
    if data.get("engine") != "vllm" or data.get("device", "cuda") != "cuda" or not isinstance(part, dict):
        return data
    return {**data, "vllm": {**CUDA_DEFAULTS, **part}}


def _image_problems(s: Settings) -> list[str]:
    """Return why an image reference cannot be relied on: a tag can be another image tomorrow.

    The CPU device is for trying things out, with images that were built a minute ago.
    """
    if s.image_inputs or REFERENCE.match(s.image):
        wanted = built_reference(s.image_inputs) if s.image_inputs else "image_inputs that say of what it was"
        return [
            f"image: found {s.image!r}; a built image has its name from its inputs, expected {wanted}. Fix:"
            " glm53_image_build in the inventory (not glm53_image); site.yml then writes both"
        ] * (s.image != wanted)
    if s.device == "cpu" or PINNED.match(s.image):
        return []
    return [
        f"image: found {s.image!r}, expected it by digest (NAME@sha256:64 digits) or, built here, by its id"
        " (sha256:64 digits): a tag can be pushed again and is then another image. Fix: `docker image inspect"
        " --format '{{index .RepoDigests 0}} {{.Id}}' IMAGE` on the head says both"
    ]


def _cross_checks(s: Settings) -> list[str]:
    problems = _image_problems(s)
    if s.api.bind == "management" and not s.api.without_key:
        problems.append(
            "api.bind: found 'management' with no key; anyone on that network could use the model."
            " Fix: bind 'loopback', or say api.without_key: true (glm53_api_without_key)"
        )
    problems += canary_problems(s.canary, s.window)
    if s.api.port == s.gate.port:
        problems.append(f"gate.port: found {s.gate.port}, the API's own port; give each its own")
    if s.rendezvous_port in (s.api.port, s.gate.port):
        problems.append(
            f"{s.engine}.rendezvous_port: found {s.rendezvous_port}, the port of the API or the gate; give"
            " each its own"
        )
    choice = choose_drafter(s)
    if isinstance(choice, Refusal):
        problems += choice.reasons
    if s.engine == "vllm":
        problems += vllm_problems(s.vllm, device=s.device, image=s.image)
    else:
        kind, parallel = DrafterKind.DFLASH2, _parallel(s) or 1
        if isinstance(choice, Choice):
            kind, parallel = choice.kind, choice.parallel
        problems += tensorfold_problems(s.tensorfold, kind, parallel, device=s.device)
    return problems + supervision_problems(s.supervision)
