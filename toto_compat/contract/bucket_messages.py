"""What fixed_size says about its buckets: written by the model, read by `analyze` and the recompile suite.

Every bucket has a code object of its own, so dynamo's recompile log never shows a new one. These lines do.
"""

BUCKET_LOGGER = "toto_compat.buckets"
ARTIFACT_LOGGER = "toto_compat.artifacts"  # what was compiled by an earlier process, and what is kept for the next


def compiling_bucket(shape: str, number: int, most: int, *, announced: bool) -> str:
    """The line at the moment a bucket is compiled; `number` counts those held with it.

    `shape` is such as 'decode step for batch 1, variates 2, capacity 16'.
    """
    end = "" if announced else ", not announced"
    return f"compiling {shape} (bucket {number} of at most {most}{end})"


def dropping_bucket(shape: str, most: int) -> str:
    """The line at the moment the least recently used bucket goes."""
    return f"dropping {shape} (least recently used of at most {most})"
