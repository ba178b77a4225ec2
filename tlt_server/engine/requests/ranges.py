"""Numbers that a batch's tensors hold: the gate of the HTTP process and a scheduler's intake have the same bounds."""

INT32 = range(-(2**31), 2**31)
INT64 = range(-(2**63), 2**63)
FLOAT32 = 3.4028234e38
