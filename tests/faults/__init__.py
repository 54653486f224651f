"""`make faults`: every fault drill on the lab, as one table.

A drill injects one fault into a serving pair, or into its next start, and watches the gate: what was detected
after how long, when the pair served again, with which evidence. In a false-alarm drill nothing may happen.
`hosts` are the faults of machines and processes, run against the TensorFold double and against the real vLLM;
`tensorfold` are the engine's own, run against the double, a program built from TensorFold's published
interface (lab/tensorfold). What a real GB10 does under these faults is not shown here.
"""
