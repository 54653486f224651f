"""Which folders of weights every node needs for what is asked, and what of each must be there."""

from __future__ import annotations

import msgspec

from glm53_service.artifacts.draft import NEEDED, WEIGHTS
from glm53_service.drafter import Choice, DrafterKind
from glm53_service.settings import Settings, choose_drafter


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder at the same path on every node.

    `needed` are files without which it is not complete. `hash`: small enough to be compared by content each
    time. `sha256` is what the owner pinned, by file name.
    """

    name: str
    path: str
    needed: tuple[str, ...]
    hash: bool = False
    sha256: dict[str, str] = {}


def needed_folders(settings: Settings) -> tuple[Folder, ...]:
    """Return the model's folder, and the drafter's once its licence lets a start use it."""
    model = Folder(name="model", path=settings.model.path, needed=("config.json",))
    choice = choose_drafter(settings)
    if not isinstance(choice, Choice) or choice.kind is not DrafterKind.DFLASH2:
        return (model,)
    pinned = {WEIGHTS: settings.drafter.sha256} if settings.drafter.sha256 else {}
    return (model, Folder(name="drafter", path=choice.path, needed=NEEDED, hash=True, sha256=pinned))


def unused_drafter(settings: Settings) -> str:
    """Return why the drafter's folder that is set is not needed; empty when it is, or when none is set."""
    path = settings.drafter.path
    choice = choose_drafter(settings)
    if path is None or not isinstance(choice, Choice) or choice.kind is DrafterKind.DFLASH2:
        return ""
    return f"drafter {path} is neither required nor shipped: {choice.line()}"
