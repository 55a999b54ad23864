"""Kernels and their launch wrappers, with the CPU twin of each; see the modules."""
