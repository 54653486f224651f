"""A stand-in for TensorFold 0.6.0: the program (`double`), its image, and a tiny checkpoint for it."""
