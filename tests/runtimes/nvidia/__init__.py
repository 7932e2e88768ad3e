"""Stand-ins for NVIDIA's programs, which the tests put on PATH: what calls them is real."""
