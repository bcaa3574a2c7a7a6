"""Run every benchmark that needs no GPU, print the figures and write them to results/."""

from __future__ import annotations

import json

from benchmarks import decoder_cpu, machine


def main() -> None:
    figures = {"fp32": decoder_cpu.measure("fp32"), "bf16": decoder_cpu.measure("bf16")}
    print(f"decoder_cpu  {json.dumps(figures)}")
    print(f"written to {machine.write('decoder_cpu', figures).relative_to(machine.ROOT)}")


if __name__ == "__main__":
    main()
