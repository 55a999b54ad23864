"""What each provider does, and why not when it does not."""

from __future__ import annotations

import collections
import warnings

__all__ = ["Provider"]


class Provider:
    """A vendor library: what it serves, what runs instead, and what it refused.

    Attributes
    ----------
    library : str
        Its name and version once it is loaded.
    missing : str
        Why it cannot be used at all; empty if it can.
    refused : Counter
        How many calls went to the fallback, by reason.
    elsewhere : Counter
        How many of them another library took, by its name and the reason.
    """

    def __init__(self, serves: str, instead: str) -> None:
        self.serves = serves
        self.instead = instead
        self.library = ""
        self.missing = ""
        self.refused: collections.Counter = collections.Counter()
        self.elsewhere: collections.Counter = collections.Counter()

    def is_missing(self, reason: str, install: str) -> None:
        """Keep why the library cannot be used, and warn: once, as it is looked for once."""
        self.missing = f"{reason}; {install}"
        warnings.warn(
            f"{self.serves} run through {self.instead}: {self.missing}",
            RuntimeWarning,
            stacklevel=2,
        )

    def lines(self) -> list[str]:
        """Say who serves, in a line, and what was refused, in a line for each reason."""
        if self.missing:
            return [f"{self.serves}: {self.instead} ({self.missing})"]
        if not self.library:
            return [f"{self.serves}: NumPy (no GPU that CuPy can use)"]
        found = [f"{self.serves}: {self.library}"]
        taken: collections.Counter = collections.Counter()
        for (name, reason), count in sorted(self.elsewhere.items()):
            found.append(f"    {count} by {name}: {reason}")
            taken[reason] += count
        for reason, count in sorted((self.refused - taken).items()):
            found.append(f"    {count} by {self.instead}: {reason}")
        return found
