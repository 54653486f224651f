"""Runs GLM-5.3-Flash as ranks on a pair of DGX Sparks: starts them together, says ready on tokens, stops
together.
"""

__version__ = "0.1.0"
