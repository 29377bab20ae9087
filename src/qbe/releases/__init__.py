"""Releases: which model folder is served as stable, candidate and previous, and the switch from one to another."""
