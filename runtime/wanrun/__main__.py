"""The command ``wanrun``, also as ``python -m wanrun``."""

from wanrun.early import handle_early


def main() -> None:
    """Runs the command and ends the process."""
    handle_early()
    from wanrun.cli import wanrun
    from wanrun.console import leave, run

    leave(run(wanrun))


if __name__ == "__main__":
    main()
