"""The `qbe` command: `main.py` puts the commands together, a file each."""
