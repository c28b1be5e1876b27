"""``python -m sessiontree``: the command line."""

from sessiontree.cli import main

if __name__ == "__main__":
    main()
