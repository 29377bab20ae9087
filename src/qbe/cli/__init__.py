"""The `qbe` command: `main.py` puts the commands together, a file each."""

from qbe.cli.main import main

__all__ = ["main"]  # as `qbe` scripts of version 0.1 import it
