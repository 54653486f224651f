"""The two cgroup layouts, from the text of /proc/self/mountinfo."""

from pathlib import Path

import pytest

from lab.cgroups import Hierarchy, detect
from lab.errors import LabError

UNIFIED = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = """\
30 24 0:25 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
33 30 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""


def test_unified_layout() -> None:
    """Prevents the lab from looking for a named v1 tree on a current Debian or Ubuntu."""
    assert detect(UNIFIED) == Hierarchy(Path("/sys/fs/cgroup"))


def test_hybrid_layout_needs_both_trees() -> None:
    """Prevents two hosts that share systemd's v1 tree and so manage each other's units."""
    found = detect(HYBRID)
    assert found == Hierarchy(Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/systemd"))
    assert found.trees == (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/systemd"))


def test_without_a_v2_tree_it_says_what_to_mount() -> None:
    """Prevents a lab that starts without any way to end its processes."""
    with pytest.raises(LabError, match="mount -t cgroup2"):
        detect(HYBRID.replace("cgroup2 cgroup2", "tmpfs tmpfs"))


def test_a_second_v2_mount_elsewhere_is_not_the_place() -> None:
    """Prevents hosts' cgroups in some tool's private view of the tree instead of the machine's own."""
    other = "29 24 0:27 /sub /run/tool/cgroup rw - cgroup2 cgroup2 rw\n"
    assert detect(other + UNIFIED) == Hierarchy(Path("/sys/fs/cgroup"))
