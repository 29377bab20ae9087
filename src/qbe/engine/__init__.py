"""Serving: sequences, scheduler, runner, sampler, plan, and the core loop that joins them."""
