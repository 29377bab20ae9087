"""`qbe advise`: what keeps a server from its service level, and the lowest rung of the ladder that is enough."""
