"""Speed claims: ratios measured interleaved in one process, with their spread. `nox -s bench` runs it."""
