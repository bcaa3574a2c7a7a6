"""Run every benchmark that needs no GPU, print the figures and write them to results/."""

from __future__ import annotations

import json

from benchmarks import decoder_cpu, machine


def main() -> None:
    figures = decoder_cpu.measure()
    print(f"decoder_cpu  {json.dumps(figures)}")
    print(f"written to {machine.write('decoder_cpu', figures).relative_to(machine.ROOT)}")


if __name__ == "__main__":
    main()
