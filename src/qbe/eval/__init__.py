"""`qbe eval`: what a model still knows and finds at lower precision, measured on real text."""
