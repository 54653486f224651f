"""Builds of kernels: locks that hold up a rank, while somebody builds and when nobody does any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm53_service.doctor.finding import Finding, Noun, good, info, warning
from glm53_service.doctor.source import Source

LOCKS = (
    "find",
    "/var/lib/glm53/cache",
    "-path",
    "*/torch_extensions/*/lock",
    "-type",
    "f",
    "-printf",
    "%T@ %p\n",
)
LONG_SECONDS = 900.0
"""An extension builds in seconds to minutes (first starts with an empty cache took 297 to 441 s in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """`locks` are (path, seconds since it was made), the oldest first; `serving`: a rank runs here."""

    locks: tuple[tuple[str, float], ...]
    serving: bool


async def read(source: Source) -> Kernels:
    """Gather."""
    listed = await source.run(*LOCKS)
    ranks = await source.run("docker", "ps", "--quiet", "--filter", "label=glm53.rank")
    rows = [line.split(" ", 1) for line in listed.out.splitlines() if " /" in line]
    locks = sorted((float(made), path) for made, path in rows)
    return Kernels(
        locks=tuple((path, source.wall - made) for made, path in locks), serving=bool(ranks.out.strip())
    )


def check(kernels: Kernels) -> Iterator[Finding]:
    """Judge."""
    if not kernels.locks:
        yield good("kernels.lock", "no build of kernels is locked")
        return
    path, age = kernels.locks[0]
    others = f" and {len(kernels.locks) - 1} more" if len(kernels.locks) > 1 else ""
    found = f"{path}{others}, for {age / 60:.0f} min"
    if not kernels.serving:
        yield info("kernels.lock", found, "no lock while no rank runs", "nothing: the next start removes it")
    elif age >= LONG_SECONDS:
        yield warning(
            "kernels.lock",
            found,
            f"a build of kernels to end within {LONG_SECONDS / 60:g} min",
            "does `ps -e` show ninja, nvcc or ptxas? Then wait. Else a killed build left it:"
            " systemctl restart glm53-head",
        )
    else:
        yield good("kernels.lock", f"kernels are being built: {found}")


NOUN = Noun(name="kernels", read=read, check=check)
