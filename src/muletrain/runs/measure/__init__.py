"""Measures this machine, and the fleet of a run before training."""
