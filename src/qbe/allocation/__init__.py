"""Bits per site under a budget of average bits: what policies and the check of a store's sensitivities share."""
