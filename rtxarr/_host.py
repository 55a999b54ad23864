"""The CPU as a device: its stream and its memory."""

from __future__ import annotations

import os

__all__ = ["HostStream", "host_memory"]


class HostStream:
    """The CPU's stream: everything has already happened."""

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def synchronize(self) -> None:
        """Return at once."""

    def __repr__(self) -> str:
        return "Stream('cpu')"


def host_memory() -> dict[str, int]:
    """Give memory figures of this process and the machine, in bytes; zeros where unknown."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = (page * os.sysconf(f"SC_{name}_PAGES") for name in ("AVPHYS", "PHYS"))
        with open("/proc/self/statm") as f:
            used = page * int(f.read().split()[1])
    except (AttributeError, OSError, ValueError):  # not Linux
        used = free = total = 0
    return {"used": used, "pool": used, "free": free, "total": total}
