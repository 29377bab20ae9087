"""`qbe check`: whether a model will run on a target as it is to be served, by layers, before it is."""
