"""`python -m qbe` is `qbe`."""

from qbe.cli.main import main

if __name__ == "__main__":
    main()
