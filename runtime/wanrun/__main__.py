"""The command ``wanrun``, as ``python -m wanrun``: whatever package is installed under this name."""

import sys
from importlib.metadata import entry_points

if __name__ == "__main__":
    for command in entry_points(group="console_scripts", name="wanrun"):
        command.load()()
    sys.exit("error: the command wanrun is not installed; run pip install . in the checkout")
