"""A canary: a candidate budget or policy for some of the traffic, on the same store, judged against what is stable."""
