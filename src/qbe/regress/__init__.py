"""`qbe regress`: whether a candidate, as it is served, still does what its baseline does."""
