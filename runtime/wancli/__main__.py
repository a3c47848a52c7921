"""The command ``wanrun``; ``wanrun serve`` is ``wancli.serve``."""

import sys

from wancli.early import start


def main() -> None:
    """Runs the command and ends the process."""
    if sys.argv[1:2] == ["serve"]:
        from wancli.serve import main as serve

        serve()
    start()
    from wancli.parent import run_with_parent

    run_with_parent()
    from wancli.console import leave, run
    from wancli.run import wanrun

    leave(run(wanrun))


if __name__ == "__main__":
    main()
