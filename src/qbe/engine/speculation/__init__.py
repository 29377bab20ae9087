"""Speculative decoding by the model itself at fewer bits, or by n-grams."""
