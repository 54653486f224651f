"""What the rails' last measurement said. The doctor does not measure: that is playbooks/bandwidth.yml."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm53_service.bandwidth.command import gather_line, line
from glm53_service.bandwidth.gather import Gathered
from glm53_service.bandwidth.measure import HEALTHY_GBITS, STALE_CURE, Result, Verdict, kept_in
from glm53_service.doctor.finding import Finding, Noun, good, info, warning
from glm53_service.doctor.source import Source

FILE = "var/lib/glm53/bandwidth.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The newest result of each rail and direction that was sent from here."""

    results: tuple[Result, ...]
    gathered: Gathered | None


async def read(source: Source) -> Speed:
    """Gather."""
    kept = kept_in(source.read(FILE))
    return Speed(results=kept.results, gathered=kept.gathered)


def check(speed: Speed) -> Iterator[Finding]:
    """Judge."""
    for result in speed.results:
        if result.verdict is Verdict.HEALTHY:
            yield good("bandwidth.rail", line(result))
        else:
            yield warning(
                "bandwidth.rail",
                line(result),
                f"{HEALTHY_GBITS:g} Gb/s and more",
                STALE_CURE
                if result.verdict is Verdict.STALE
                else "measure again with nothing else running; `glm53 fabric` shows MTU and state",
            )
    gathered = speed.gathered
    if gathered and gathered.problem:
        yield warning(
            "bandwidth.gather",
            gather_line(gathered),
            "NCCL over RDMA: 12 GB/s over one rail, 20 and more over both",
            "measure again; then read NCCL's lines: /dev/infiniband, locked memory, the image's libibverbs",
        )
    elif gathered:
        yield good("bandwidth.gather", gather_line(gathered))
    if not speed.results:
        yield info(
            "bandwidth.rail", "never measured from here", "", "ansible-playbook playbooks/bandwidth.yml"
        )


NOUN = Noun(name="bandwidth", read=read, check=check, files=(FILE,))
