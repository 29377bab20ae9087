"""The version of QBE, where rooms below the package's front can read it."""

__version__ = "0.2.0.dev0"
