"""The version of QBE, where rooms below the package's front can read it."""

__version__ = "0.1.0"
