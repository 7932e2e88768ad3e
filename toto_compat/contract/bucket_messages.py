"""What fixed_size says about its buckets: written by the model, read by `analyze` and the recompile suite.

Every bucket has a code object of its own, so dynamo's recompile log never shows a new one. These lines do.
"""

BUCKET_LOGGER = "toto_compat.buckets"


def compiling_bucket(shape: tuple[int, int, int], number: int, most: int, *, announced: bool) -> str:
    """The line at the moment a bucket is compiled; `number` counts those held with it."""
    end = "" if announced else ", not announced"
    return f"compiling decode step for {_shape_text(shape)} (bucket {number} of at most {most}{end})"


def dropping_bucket(shape: tuple[int, int, int], most: int) -> str:
    """The line at the moment the least recently used bucket goes."""
    return f"dropping decode step for {_shape_text(shape)} (least recently used of at most {most})"


def _shape_text(shape: tuple[int, int, int]) -> str:
    batch, variates, capacity = shape
    return f"batch {batch}, variates {variates}, capacity {capacity}"
