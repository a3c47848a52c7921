"""The command ``wanrun``, also as ``python -m wanrun``; ``wanrun serve`` is ``wancli.serve``."""

import sys

from wanrun.terminal.early import start


def main() -> None:
    """Runs the command and ends the process."""
    if sys.argv[1:2] == ["serve"]:
        from wancli.serve import main as serve

        serve()
    start()
    from wanrun import run_with_parent

    run_with_parent()
    from wancli.run import wanrun
    from wanrun.terminal.console import leave, run

    leave(run(wanrun))


if __name__ == "__main__":
    main()
