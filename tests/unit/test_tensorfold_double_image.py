"""What the image of the TensorFold double is made of."""

from __future__ import annotations

import re

import pytest

from lab.errors import LabError
from lab.tensorfold.image import LOCK, PACKAGES, double_changes, locked, sources


def test_packages_come_with_the_hashes_of_the_lock() -> None:
    """Prevents the image from having another aiohttp than the product, or one that nobody pinned."""
    found = locked(LOCK.read_text(), PACKAGES)
    names = re.findall(r"^([a-z-]+)==\S+", found, re.MULTILINE)
    assert tuple(names) == PACKAGES
    assert all("--hash=sha256:" in entry for entry in re.split(r"\n(?=[a-z])", found.strip()))
    assert not re.search(r"\\\n(?! +--hash)", found)
    with pytest.raises(LabError, match="no line nothing==VERSION"):
        locked(LOCK.read_text(), ("nothing",))


def test_the_program_is_all_there_and_nothing_else() -> None:
    """Prevents a changed file of the program from leaving an old image in the cache."""
    found = sources()
    assert {"double/cli.py", "double/glm5_next/cuda/dflash2.py", "files/install.sh"} <= set(found)
    assert not any(
        "lab." in line for text in found.values() for line in re.findall(r"^(?:from|import) .*", text, re.M)
    )


def test_the_configuration_is_the_recipes() -> None:
    """Prevents an adapter from relying on an environment that only the double's image has, or lacks."""
    changes = double_changes()
    assert "ENV TORCH_EXTENSIONS_DIR=/cache/torch_extensions" in changes
    assert 'ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]' in changes
    assert sum(bool(re.fullmatch(r"LABEL tf\.patches=[0-9a-f]{12}", change)) for change in changes) == 1
