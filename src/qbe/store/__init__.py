"""The nested store: one copy of each weight matrix from which every precision is read."""
