"""The command ``wanrun``, also as ``python -m wanrun``; ``wanrun serve`` is the package ``wanserve``."""

import sys

from wanrun.terminal.early import start


def main() -> None:
    """Runs the command and ends the process."""
    if sys.argv[1:2] == ["serve"]:
        from wanserve.cli import main as serve

        serve()
    start()
    from wanrun.cli import wanrun
    from wanrun.terminal.console import leave, run

    leave(run(wanrun))


if __name__ == "__main__":
    main()
