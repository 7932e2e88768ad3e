"""Samples judged by upstream eager: each drawn point's place in the distribution that eager gives it.

Eager is fed the candidate's own draws and says, point by point, from which distribution the next one must come. The
probability below each drawn point is then uniform and independent, whatever the seed, if and only if the candidate
draws from eager's distributions. Neither a seed nor the candidate's own `teacher_forced` is needed.
"""

from dataclasses import dataclass

import torch
from scipy import special, stats
from torch import Tensor

from toto_compat.model.bound import WholeModel
from toto_compat.model.series import Series

# One false alarm in a million cells, over all tests of a cell. This project's choice.
FALSE_ALARMS = 1e-6
_MOST_ROWS = 64  # of a sample batch that are held against eager: more only cost time
_TAIL = 0.01


@dataclass(frozen=True)
class Finding:
    """One test of the drawn points: its statistic over what chance allows. Above 1 is no chance."""

    test: str
    ratio: float
    told: str


def places(eager: WholeModel, series: Series, samples: Tensor) -> Tensor:
    """The probability below every drawn point: [row, variate, time], rows being samples times series."""
    batch, variates, steps, count = samples.shape
    kept = min(count, max(1, _MOST_ROWS // batch))
    # spread over all rounds of sampling, not the first rows of the first one
    chosen = torch.linspace(0, count - 1, kept).round().long()
    drawn = samples[..., chosen].permute(3, 0, 1, 2).reshape(kept * batch, variates, steps).to(series.inputs.dtype)
    repeated = Series(**{name: value.repeat(kept, *[1] * (value.dim() - 1)) for name, value in vars(series).items()})
    below = []
    for step, predicted in enumerate(eager.predictive(repeated, drawn)):
        points = drawn[..., step * eager.patch_size : (step + 1) * eager.patch_size].double()
        scaled = (points - predicted["affine_loc"].double()) / predicted["affine_scale"].double()
        df, loc, scale = (predicted[name].double() for name in ("df", "loc", "scale"))
        if "probs" in predicted:
            each = stats.t.cdf(((scaled.unsqueeze(-1) - loc) / scale).cpu().numpy(), df.cpu().numpy())
            below.append((torch.from_numpy(each) * predicted["probs"].double().cpu()).sum(-1))
        else:
            below.append(torch.from_numpy(stats.t.cdf(((scaled - loc) / scale).cpu().numpy(), df.cpu().numpy())))
    return torch.cat(below, dim=-1)


def findings(below: Tensor) -> list[Finding]:
    """Test that places are uniform and independent over points, rows and rounds."""
    rows = below.shape[0]
    flat = below.flatten()
    # a point at the very end of its distribution is possible, infinity is not a number to reckon with
    normal = torch.from_numpy(special.ndtri(below.clamp(1e-12, 1 - 1e-12).numpy()))
    vectors = normal.reshape(rows, -1)
    pairs = rows * (rows - 1) // 2
    tests = 6 + pairs
    return [
        _uniform(flat, tests),
        _count("below the lowest hundredth", int((flat < _TAIL).sum()), flat.numel(), tests),
        _count("above the highest hundredth", int((flat > 1 - _TAIL).sum()), flat.numel(), tests),
        _score("location", float(vectors.mean()) * flat.numel() ** 0.5, tests),
        _score("spread", (float(vectors.square().mean()) - 1.0) * (flat.numel() / 2.0) ** 0.5, tests),
        _neighbours(normal, tests),
        *_rows_apart(vectors, tests),
    ]


def _critical(tests: int) -> float:
    return float(stats.norm.isf(FALSE_ALARMS / tests / 2.0))


def _score(test: str, score: float, tests: int) -> Finding:
    return Finding(test, abs(score) / _critical(tests), f"{score:+.1f} standard errors")


def _uniform(places_: Tensor, tests: int) -> Finding:
    """Kolmogorov-Smirnov: the largest gap between the places and a uniform distribution."""
    count = places_.numel()
    distance = float(stats.kstest(places_.numpy(), "uniform").statistic)
    critical = float(stats.kstwobign.isf(FALSE_ALARMS / tests)) / count**0.5
    return Finding("uniform", distance / critical, f"largest gap {distance:.3f} over {count} points")


def _count(where: str, seen: int, count: int, tests: int) -> Finding:
    expected = count * _TAIL
    score = (seen - expected) / (expected * (1 - _TAIL)) ** 0.5
    finding = _score(where, score, tests)
    return Finding(finding.test, finding.ratio, f"{seen} points, {expected:.0f} expected")


def _neighbours(normal: Tensor, tests: int) -> Finding:
    """Points next to each other in time must not follow each other."""
    product = normal[..., 1:] * normal[..., :-1]
    return _score("neighbouring points", float(product.mean()) * product.numel() ** 0.5, tests)


def _rows_apart(vectors: Tensor, tests: int) -> list[Finding]:
    """No two rows, of one round or of two, may know of each other."""
    rows, points = vectors.shape
    if rows < 2 or points < 8:
        return []
    correlation = torch.corrcoef(vectors)
    above = correlation[torch.triu_indices(rows, rows, offset=1).unbind()]
    worst = float(above.abs().max().clamp(max=1 - 1e-12))
    score = 0.5 * torch.log(torch.tensor((1 + worst) / (1 - worst))).item() * (points - 3) ** 0.5
    return [Finding("rows and rounds", score / _critical(tests), f"largest correlation {worst:.3f}")]
