"""`qbe calibrate`: from logs to the set of passages that a store is made on."""
