"""From kernels as loops to text and machine code, for each target."""
