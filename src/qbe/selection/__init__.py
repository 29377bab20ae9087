"""From a query to its blueprint, for both engines."""
