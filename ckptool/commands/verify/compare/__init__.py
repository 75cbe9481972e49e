"""Comparison of one checkpoint with another."""
