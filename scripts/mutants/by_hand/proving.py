"""Faults in `braid prove`: proofs that hold although they should not, and small runs of another kind."""

from __future__ import annotations

from scripts.mutants.mutant import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="gradients-are-compared-with-themselves",
        file="prove/compare.py",
        old="distance = torch.linalg.vector_norm(found.double() - reference.double())",
        new="distance = torch.linalg.vector_norm(found.double() - found.double())",
        kind="dropped term",
        why="every proof holds",
    ),
    Fault(
        name="a-proof-ends-well-whatever-it-finds",
        file="cli/prove.py",
        old="return ExitCode.OK if holds else ExitCode.BUG",
        new="return ExitCode.OK",
        kind="ignored mask",
        why="a script goes on to pay for GPUs",
    ),
    Fault(
        name="pairs-of-axes-left-out",
        file="prove/shrink.py",
        old="missing = {pair for pair in missing if not set(pair) <= set(best)}",
        new="missing = set()",
        kind="dropped term",
        why="of four axes, one is in no proof",
    ),
    Fault(
        name="heads-are-no-longer-shared-by-ranks",
        file="prove/shrink.py",
        old="return after if few >= before else max(1, few * after // before)",
        new="return after",
        kind="dropped term",
        why="the sum over ranks that share key-value heads is in no proof",
    ),
    Fault(
        name="groups-of-blocks-are-kept-once",
        file="prove/shorten.py",
        old="enough = max(2, -(-fewest // length))",
        new="enough = max(1, -(-fewest // length))",
        kind="off by one",
        why="what follows the last block of a group is in no proof",
    ),
    Fault(
        name="layers-with-and-without-windows-count-as-equal",
        file="prove/shorten.py",
        old="return str(block), tuple(e.nth % windows for e in block.layers if e.kind is Kind.ATTENTION)",
        new="return str(block)",
        kind="ignored mask",
        why="a pattern of windows is cut off where it does not begin again",
    ),
)
