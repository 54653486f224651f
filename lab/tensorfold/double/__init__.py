"""A double of TensorFold 0.6.0 for tests: no model, no GPU, no code of TensorFold.

It behaves as published sources describe the 0.6.0 image of the two-Spark recipe: command line, environment,
start-up lines, rendezvous, HTTP API, exit codes, signals. The lab's image has this folder installed under the
name `tensorfold`. What can be made to go wrong is in `switches.py` and `faults.py`.
"""

VERSION = "0.6.0"
NOTICE = (
    f"[tensorfold-double] this is a double of TensorFold {VERSION} for tests, built from published facts;"
    " it runs no model and no GPU code"
)
