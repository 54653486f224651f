"""Measures a rail, one direction at a time, and says what the figure means."""
