"""Which folders of weights every node needs for what is asked, and what of each must be there."""

from __future__ import annotations

from typing import Literal

import msgspec

from glm53_service.artifacts.draft import NEEDED, WEIGHTS
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.plan import Place
from glm53_service.artifacts.sources import Want, wants
from glm53_service.drafter import Choice, DrafterKind
from glm53_service.settings import Settings, Source, choose_drafter


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder at the same path on every node: a Want as the playbooks hand it round.

    `needed` are files without which it is not complete. `sha256` is what the owner pinned of the weights.
    """

    name: Literal["model", "drafter"]
    path: str
    needed: tuple[str, ...]
    source: Source | None = None
    sha256: str = ""

    @property
    def want(self) -> Want:
        """Return it as something to have."""
        return Want(what=self.name, layout=layout_of(self.path), source=self.source, sha256=self.sha256)


def needed_folders(settings: Settings) -> tuple[Folder, ...]:
    """Return the model's folder, and the drafter's once its licence lets a start use it."""
    return tuple(
        Folder(
            name=want.what,
            path=str(want.layout.folder),
            needed=NEEDED if want.what == "drafter" else ("config.json",),
            source=want.source,
            sha256=want.sha256,
        )
        for want in wants(settings)
    )


def unused_drafter(settings: Settings) -> str:
    """Return why the drafter's folder that is set is not needed; empty when it is, or when none is set."""
    path = settings.drafter.path
    choice = choose_drafter(settings)
    if path is None or not isinstance(choice, Choice) or choice.kind is DrafterKind.DFLASH2:
        return ""
    return f"drafter {path} is neither required nor shipped: {choice.line()}"


def incomplete(folder: Folder, place: Place) -> list[str]:
    """Return what is wrong with the head's own folder, as far as names, sizes and its manifest show it."""
    what = f"{folder.name} {folder.path}"
    if not place.files and not place.missing:
        return [f"{what}: no such directory, or an empty one"]
    lacking = [name for name in folder.needed if not place.files.get(name, (0, 0))[0]]
    problems = [f"{what}: {name} is missing or empty" for name in lacking]
    if place.missing:
        names = ", ".join(place.missing[:3])
        problems.append(
            f"{what}: {len(place.missing)} links lead nowhere or files of its index are missing ({names})"
        )
    if place.manifest is not None:
        wrong = [e.path for e in place.manifest.files if e.path not in lacking and place.differs(e)]
        if wrong:
            problems.append(
                f"{what}: {len(wrong)} files are not what its manifest says ({', '.join(wrong[:3])})"
            )
        own = next((e.sha256 for e in place.manifest.files if e.path == WEIGHTS), folder.sha256)
        if folder.sha256 and own != folder.sha256:
            problems.append(
                f"{what}: {WEIGHTS} has SHA-256 {own[:12]}, the inventory's glm53_drafter.sha256 is"
                f" {folder.sha256[:12]}"
            )
    return problems
