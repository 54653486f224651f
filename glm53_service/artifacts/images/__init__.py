"""The engine image: pulled by digest, and what a run would move of it."""
