"""Comparison of a step of a run with the steps before it: what they say of one another."""
