"""All that the doctor looks at, in the order in which it is shown."""

from __future__ import annotations

from typing import Any

from glm53_service.doctor import (
    accelerator,
    artifacts,
    containers,
    daemons,
    driver,
    firewall,
    host,
    kernel,
    kernels,
    memory,
    ports,
    rails,
    service,
    speed,
)
from glm53_service.doctor.finding import Noun

NOUNS: tuple[Noun[Any], ...] = (
    service.NOUN,
    rails.NOUN,
    speed.NOUN,
    kernel.NOUN,
    driver.NOUN,
    accelerator.NOUN,
    memory.NOUN,
    containers.NOUN,
    kernels.NOUN,
    artifacts.NOUN,
    ports.NOUN,
    firewall.NOUN,
    daemons.NOUN,
    host.NOUN,
)

FILES = tuple(dict.fromkeys(pattern for noun in NOUNS for pattern in noun.files))
