"""Readers of a run directory."""
