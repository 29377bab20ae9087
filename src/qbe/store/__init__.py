"""The nested store: one set of codes for each weight matrix, from which every precision below 16 bits is read."""
