"""The command ``wanrun``, as ``python -m wanrun``."""

from wancli.__main__ import main

if __name__ == "__main__":
    main()
