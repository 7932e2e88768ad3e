"""Equivalence and determinism: does the compiled cell forecast what upstream eager forecasts?

Three processes. `reference` asks upstream eager, in float32 and float64; `candidate` asks the cell's cache and is told
the values to be fed, not the answers; `compare`, where the candidate was never imported, holds one against the other,
and two runs of one seed against each other (`determinism`).
"""
