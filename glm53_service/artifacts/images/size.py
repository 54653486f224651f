"""How many bytes a pull would bring, or why nobody can say."""

from __future__ import annotations

import asyncio

from glm53_service.artifacts.images.credentials import TOKEN_USER, Login
from glm53_service.artifacts.images.engine import Engine, Platform
from glm53_service.artifacts.images.reference import Reference
from glm53_service.artifacts.images.registry import Registry, Unknown


async def manifest_size(
    engine: Engine, reference: Reference, platform: Platform, login: Login | None
) -> int | str:
    """Return the bytes that the registry's manifest lists, or why they are not known."""
    pair = (login.user, login.secret) if login is not None and login.user != TOKEN_USER else None
    info = await engine.info()
    try:
        registry = Registry(reference.registry, info, login=pair)
        return await asyncio.to_thread(
            registry.size, reference.repository, reference.digest, platform.architecture
        )
    except Unknown as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"{reference.registry}: {error}"
