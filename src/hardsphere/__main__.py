"""``python -m hardsphere``."""

from hardsphere.cli import main

if __name__ == "__main__":
    main()
