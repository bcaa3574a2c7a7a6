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
)
