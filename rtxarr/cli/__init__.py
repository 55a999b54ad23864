"""The ``rtx`` command."""

import io
import sys
from importlib.util import find_spec

__all__ = ["main"]

_NEEDED = ("typer", "rich", "matplotlib", "threadpoolctl")


def main() -> int:
    """Run the command line; give the exit status, 2 for what was asked for wrongly."""
    for stream in (sys.stdout, sys.stderr):  # None when closed
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for encodings without a character
    try:
        return _main()
    except KeyboardInterrupt:
        return 130


def _main() -> int:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"rtx needs {', '.join(missing)}, not installed here: pip install 'rtxarr[cli]'",
            file=sys.stderr,
        )
        return 2
    from rtxarr.cli._app import app

    return app()
