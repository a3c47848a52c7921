"""The command ``wanbuild``, also as ``python -m wanbuild``."""

from wanrun.terminal.early import start


def main() -> None:
    """Runs the command and ends the process."""
    start()
    from wanbuild.cli import wanbuild
    from wanrun.terminal.console import leave, run

    leave(run(wanbuild))


if __name__ == "__main__":
    main()
