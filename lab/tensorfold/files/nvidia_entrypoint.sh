#!/bin/sh
# Stands where NVIDIA's entry point is in the real image, which prints a banner and then becomes the command.
echo "tensorfold double: this is a double of TensorFold 0.6.0 for tests; no NVIDIA software is in this image"
echo "(the real image prints its banner and licence text here)"
exec "$@"
