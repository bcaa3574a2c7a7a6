"""Faults in optimizers and adapters."""

from __future__ import annotations

from scripts.mutants.mutant import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="tall-matrices-iterated-on-the-long-side",
        file="optim/newton_schulz.py",
        old="tall = x_NRC.shape[1] > x_NRC.shape[2]",
        new="tall = x_NRC.shape[1] < x_NRC.shape[2]",
        kind="comparison",
        why="every iteration of Muon takes several times as long and as much memory",
    ),
    Fault(
        name="muon-moves-by-the-average-alone",
        file="optim/muon.py",
        old="gradient.copy_(torch.lerp(gradient, moved, keep) if self.settings.nesterov else moved)",
        new="gradient.copy_(moved)",
        kind="dropped term",
        why="Nesterov momentum is asked for, and plain momentum is what a run gets",
    ),
    Fault(
        name="every-copy-of-a-part-goes-to-its-owner",
        file="optim/matrix_exchange.py",
        old="return part is not None and part.first",
        new="return part is not None",
        kind="wrong group",
        why="ranks with copies send the same part again and again",
    ),
    Fault(
        name="adapters-of-row-parallel-layers-not-summed",
        file="nn/lora.py",
        old="copies=self.tp if self.row else self.tensor.copies",
        new="copies=self.tensor.copies",
        kind="wrong group",
        why="tensor-parallel ranks train adapters that differ",
    ),
    Fault(
        name="adapters-merged-without-scale",
        file="train/lora_weights.py",
        old="torch.addmm(weight.to(wide), up, down, alpha=self._lora.scale)",
        new="torch.addmm(weight.to(wide), up, down)",
        kind="missing scale",
        why="an exported model is not the one that was trained",
    ),
    Fault(
        name="scale-of-the-part",
        file="optim/muon.py",
        old="direction.to(gradient.dtype) * self.factor(canonical.shape)",
        new="direction.to(gradient.dtype) * self.factor(held.shape)",
        kind="missing scale",
        why="updates are smaller on ranks that hold a part of a matrix: the topology changes the answer",
    ),
    Fault(
        name="scale-of-adapters-upside-down",
        file="lora.py",
        old="return self.alpha / self.rank",
        new="return self.rank / self.alpha",
        kind="missing scale",
        why="adapters of a higher rank weigh more, and other libraries read them with another scale",
    ),
    Fault(
        name="any-alpha-of-lora",
        file="lora.py",
        old='yield from validators.above(f"{at}.alpha", self.alpha, 0)',
        new="pass",
        kind="accepted input",
        why="with alpha 0 a run trains nothing",
    ),
    Fault(
        name="unknown-kinds-have-a-learning-rate",
        file="optimizer.py",
        old="if kind not in PARAMETER_KINDS:",
        new="if kind is None:",
        kind="accepted input",
        why="a typo in lr_by_kind is ignored: the kind keeps the learning rate of all others",
    ),
    Fault(
        name="muon-without-iterations",
        file="optimizer.py",
        old='yield from validators.at_least(f"{at}.iterations", self.iterations, 1)',
        new="pass",
        kind="accepted input",
        why="without an iteration nothing is orthogonalised",
    ),
)
