"""polygraph: one IR that fuses array code into kernels."""
