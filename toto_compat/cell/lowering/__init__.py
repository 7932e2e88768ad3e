"""What a cache hands to Inductor, taken over for CUDA on a machine without a GPU: compiled, executed, rehearsed."""
