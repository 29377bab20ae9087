"""`python -m qbe` is `qbe`."""

from qbe.cli import main

if __name__ == "__main__":
    main()
