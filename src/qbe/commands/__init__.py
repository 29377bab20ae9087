"""The commands of `qbe`; `qbe.cli` puts them together."""
