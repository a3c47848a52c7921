"""The command ``wanbuild``, also as ``python -m wanbuild``."""

from wancli.early import start


def main() -> None:
    """Runs the command and ends the process."""
    start()
    from wanbuild.cli import wanbuild
    from wancli.console import leave, run

    leave(run(wanbuild))


if __name__ == "__main__":
    main()
