"""What evaluations and benchmarks ask, whether an answer is right, and how sure the difference is."""
