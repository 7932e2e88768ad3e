"""A small step by the code that Inductor makes for CUDA, sabotaged or not; prints how far it is from the CPU's own."""

import re
import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from toto_compat.cell.lowering.capture import every_graph_goes_to
from toto_compat.cell.lowering.described_gpu import CARDS
from toto_compat.cell.lowering.interpreter import Interpreter
from toto_compat.cell.lowering.replay import Rehearsal

ROWS, WIDTH = 3, 37  # no powers of two: every kernel has a mask


def step(x: Tensor, weight: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """A norm, a product, a softmax over a masked past: kernels with reductions, a library call, a pointwise one."""
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    scores = (normed @ weight).softmax(-1)
    return scores * past.sigmoid(), (normed.abs() + 1).log().sum(-1)


def powers(x: Tensor, _weight: Tensor, past: Tensor) -> tuple[Tensor]:
    """Whole powers of numbers on both sides of zero: NVIDIA's function takes a sign, a logarithm does not."""
    return ((x.sign() * (x.abs() + 0.5)).pow(past),)


def beyond_it(x: Tensor, _weight: Tensor, _past: Tensor) -> tuple[Tensor]:
    """A function of NVIDIA's library that Triton has not."""
    return (x.tanh().erfinv(),)


def reductions(x: Tensor, weight: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    """What Inductor reduces and scans by functions of its own: the interpreter is helped with these."""
    largest, place = weight.max(-1)
    spread, middle = torch.var_mean(x, -1)
    reduced = (largest, place, past.argmin(-1), weight.amin(0), x.prod(-1), spread, middle, x.amax(), past.softmax(0))
    return *reduced, x.cumsum(-1), x.logcumsumexp(-1), *weight.cummax(-1)


STEPS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    "layer": step,
    "powers": powers,
    "reductions": reductions,
    "beyond it": beyond_it,
}


def without_mask(source: str) -> str:
    """Drop the mask of every load of a reduction, and what keeps its extra elements out of the sum."""
    loads = re.sub(
        r"(tl\.load\([^\n]*?), (?:r0_mask & xmask|r0_mask)(, eviction_policy='\w+')?, other=0\.0\)", r"\1\2)", source
    )
    return re.sub(r"tl\.where\((?:r0_mask & xmask|r0_mask), (\w+), [^()]*\)", r"\1", loads)


def with_short_blocks(source: str) -> str:
    """Let every pointwise kernel do the first half of its elements only."""
    return re.sub(r"(xnumel = )(\d+)", lambda found: found[1] + str(max(1, int(found[2]) // 2)), source)


def without_last_kernel(source: str) -> str:
    *_, last = re.finditer(r"^ +\w+\.run\(.*\)$", source, re.MULTILINE)
    return source[: last.start()] + " " * (len(last[0]) - len(last[0].lstrip())) + "pass" + source[last.end() :]


SABOTAGES: Mapping[str, Callable[[str], str]] = {
    "none": str,
    "mask dropped": without_mask,
    "block too short": with_short_blocks,
    "kernel left out": without_last_kernel,
}


def main(sabotage: str, name: str = "layer") -> None:
    torch.manual_seed(0)
    function = STEPS[name]
    alter, altered = SABOTAGES[sabotage], []

    def altering(source: str) -> str:
        altered.append(alter(source) != source)
        return alter(source)

    interpreter = Interpreter(CARDS["sm_90"], alter=altering)
    arguments = (torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(ROWS, WIDTH).round())
    with torch.no_grad(), every_graph_goes_to(Rehearsal(interpreter)):
        run = torch.compile(function)
        got = run(*arguments)
    assert [report.error for report in interpreter.reports] == [""], interpreter.reports
    assert interpreter.launches
    assert altered == [sabotage != "none"], "the sabotage found nothing to change"
    off = [(ours.double() - theirs).abs().max() for ours, theirs in zip(got, function(*arguments), strict=True)]
    worst = torch.stack(off).nan_to_num(torch.inf).max()
    sys.stdout.write(f"{float(worst)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
