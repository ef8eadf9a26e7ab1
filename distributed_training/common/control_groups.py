"""Read the limits of Linux control groups, which Docker, Kubernetes, Slurm and systemd set.

A machine that is rented in part shows all of its cores and memory, but control groups limit what
may be used. The limits of a process's own group and of all groups above it apply, in both versions
of the interface.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the folders of our control group and of the groups above it, with their version.

    ``controller``: the controller in version 1, ``memory`` or ``cpu``. ``root``: the folder that
    contains /proc and /sys.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:  # "0::/path", or in version 1 "4:cpu,cpuacct:/path"
        controllers, _, path = group.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup"
        if controllers:
            # Some distributions link "cpu" to "cpu,cpuacct".
            mount /= controller if (mount / controller).is_dir() else controllers
        # In a container the path may be the host's path, and then the limit is at the mount.
        own = mount / path.strip("/")
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(mount))):
            yield folder, 1 if controllers else 2


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use, at least 1.

    It counts the cores that the process may run on, or fewer if a quota limits its CPU time
    (rounded up to whole cores): the kernel pauses additional threads in the middle of their work.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for folder, version in group_folders("cpu", root):
        try:
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota = int((folder / "cpu.cfs_quota_us").read_text())  # -1 means no limit
                period = int((folder / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):  # the file is missing, or says "max 100000"
            continue
        if quota > 0 and period > 0:
            cores = min(cores, math.ceil(quota / period))
    return max(1, cores)
