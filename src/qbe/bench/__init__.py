"""`qbe bench`: QBE beside its peers, on the same work in the same process, with the physical limit beside both."""
