"""What differs between engines, behind one protocol: a rank's container, what its log says, how its API is
asked.
"""

from __future__ import annotations

from glm53_service.engines.base import Engine
from glm53_service.engines.tensorfold import TensorfoldEngine
from glm53_service.engines.vllm import VllmEngine
from glm53_service.settings import Settings


def engine_for(settings: Settings) -> Engine:
    """Return the adapter of the engine that `settings` ask for (settings know no other names)."""
    engines: dict[str, type[Engine]] = {"tensorfold": TensorfoldEngine, "vllm": VllmEngine}
    return engines[settings.engine]()
