"""Run every benchmark that needs no GPU, print the figures and write them to results/."""

from __future__ import annotations

import json

from benchmarks import decoder_cpu, growth, machine, plan_speed, scans, transfer_plan


def main() -> None:
    origin = machine.describe()
    for name, measure in (
        (
            "scans",
            lambda: {scan.__name__: growth.measure(scan) for scan in (scans.ssd_scan, scans.delta_rule_scan)},
        ),
        (
            "transfer_plan",
            lambda: {grids: transfer_plan.measure(case) for grids, case in transfer_plan.CASES.items()},
        ),
        ("plan_speed", plan_speed.figures),
        ("decoder_cpu", lambda: {dtype: decoder_cpu.measure(dtype) for dtype in ("fp32", "bf16")}),
    ):
        figures = measure()
        print(f"{name}  {json.dumps(figures)}", flush=True)
        machine.write(name, figures, origin)
    print(f"written to {machine.RESULTS.relative_to(machine.ROOT)}")


if __name__ == "__main__":
    main()
