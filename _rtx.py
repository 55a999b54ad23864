"""Where the ``rtx`` command begins, before rtxarr is imported."""

import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Run ``rtx``, and let an interrupt end it quietly while it is still being imported."""
    python = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # it may be ignored
    if python:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rtxarr.cli import main

    if python:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(main())
