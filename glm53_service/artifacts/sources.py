"""What has to be on the head's disk, from where: checkpoint and drafter, each by repository and revision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glm53_service.artifacts.layout import Layout, layout_of
from glm53_service.drafter import LICENCE, REPOSITORY, DrafterKind, Refusal
from glm53_service.errors import ConfigError
from glm53_service.settings import Settings, Source, choose_drafter

RECIPES: dict[str, Source] = {
    "tensorfold": Source(
        repository="Mia-AiLab/GLM-5.3-Flash-EXL3-4bpw-TensorFold",
        revision="078455ffe6472f9a52fbc1139f58b9db2881b25c",
    ),
    "vllm": Source(
        repository="Mia-AiLab/GLM-5.3-Flash-EXL3-TR3-4bpw",
        revision="25a44fdbf16862a46b7cc9921142c6c81350af2f",
    ),
}
"""The checkpoint that each engine's published recipe pins."""

FALLBACKS: dict[str, Source] = {
    "vllm": Source(
        repository="brandonmusic/GLM-5.3-Flash-tr3-4bpw",
        revision="5ab363a8dcf6405955fd5f99671e01a1c9fb124b",
    )
}
"""Where vLLM's checkpoint was first published; the recipe takes it when its own copy is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One snapshot. `source` None: it is only ever looked at, since nobody said where it comes from."""

    what: Literal["model", "drafter"]
    layout: Layout
    source: Source | None
    fallback: Source | None = None
    sha256: str = ""

    @property
    def title(self) -> str:
        """What a person calls it."""
        return f"{self.what} {self.source}" if self.source else f"{self.what} in {self.layout.folder}"


def wants(settings: Settings) -> tuple[Want, ...]:
    """Return what these settings need on disk; ConfigError where path and source contradict each other.

    DFlash2 is wanted only where a start would use it, which needs an accepted licence.
    """
    found = [_model(settings)]
    choice = choose_drafter(settings)
    if not isinstance(choice, Refusal) and choice.kind is DrafterKind.DFLASH2:
        found.append(_drafter(settings, choice.path))
    return tuple(found)


def drafter_note(settings: Settings) -> str:
    """Return why DFlash2 is not downloaded, empty when it is."""
    choice = choose_drafter(settings)
    if isinstance(choice, Refusal):
        return "; ".join(choice.reasons)
    if choice.kind is DrafterKind.DFLASH2:
        return ""
    if settings.drafter.licence is None and settings.drafter.request == "auto":
        return f"DFlash2 is not downloaded: nobody has accepted its licence ({LICENCE}, drafter.licence)"
    return f"DFlash2 is not downloaded: this pair drafts with {choice.kind}"


def _model(settings: Settings) -> Want:
    layout, model = layout_of(settings.model.path), settings.model
    named = Source(repository=layout.repository, revision=layout.revision) if layout.hub else None
    recipe = RECIPES[settings.engine] if settings.device == "cuda" else None
    source = model.source or named or recipe
    fallback = model.fallback or (FALLBACKS.get(settings.engine) if source == recipe else None)
    _agree("model", layout, source)
    return Want(
        what="model", layout=layout, source=source, fallback=None if layout.hub is not None else fallback
    )


def _drafter(settings: Settings, path: str) -> Want:
    layout = layout_of(path)
    source = Source(repository=REPOSITORY, revision=settings.drafter.revision)
    _agree("drafter", layout, source)
    return Want(what="drafter", layout=layout, source=source, sha256=settings.drafter.sha256 or "")


def _agree(what: str, layout: Layout, source: Source | None) -> None:
    if layout.hub is None or source is None:
        return
    if (layout.repository, layout.revision) != (source.repository, source.revision):
        raise ConfigError(
            "settings.yaml",
            [
                f"{what}.path: found the snapshot {layout.repository}@{layout.revision[:12]}, expected"
                f" {source}. Fix: the path of that snapshot, or {what}'s own repository and revision"
            ],
        )
