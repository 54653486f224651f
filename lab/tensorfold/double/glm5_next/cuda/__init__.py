"""Its CUDA engine, of which the double has the drafter only."""
