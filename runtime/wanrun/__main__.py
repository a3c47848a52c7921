"""The command ``wanrun``, also as ``python -m wanrun``."""

from wanrun.terminal.early import start


def main() -> None:
    """Runs the command and ends the process."""
    start()
    from wanrun.cli import wanrun
    from wanrun.terminal.console import leave, run

    leave(run(wanrun))


if __name__ == "__main__":
    main()
