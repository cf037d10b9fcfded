"""Measuring: one timing method, the sweep, the peers."""
