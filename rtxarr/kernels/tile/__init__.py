"""Products on the tensor cores with what surrounds them, in cuTile; see the modules.

Nothing here imports ``cuda.tile`` until a kernel has to be compiled.
"""
