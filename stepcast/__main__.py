"""`stepcast` and `python -m stepcast`: the command line."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line, where what it needs is installed, and exit."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"stepcast: the command line needs {' and '.join(missing)}: pip install 'stepcast[cli]'\n")
        sys.exit(2)
    try:
        from stepcast.runtime.cli.app import main as run  # noqa: PLC0415 - needs what was just looked for

        run()
    except KeyboardInterrupt:  # outside of any command
        sys.exit(130)


if __name__ == "__main__":
    main()
