"""What a comparison of copies costs: sums of the bits of weights and moments.

    python -m benchmarks.copy_check [--million 300] [--tensors 200] [--step-ms 210] [--every 100]

The tensors are float32, a weight and two moments for each parameter. `--step-ms` is the step that the cost is a
share of; the all-gather of one number per tensor is not in it.
"""

from __future__ import annotations

import argparse
import time

import torch

from braid.train.copies import bit_sum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=300, help="parameters")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=210.0)
    parser.add_argument("--every", type=int, default=100, help="train.check_copies_every")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    each = int(options.million * 1e6) // options.tensors
    tensors = [torch.randn(each, device=device) for _ in range(3 * options.tensors)]

    def seconds(repeats: int = 5) -> float:
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            sums = torch.stack([bit_sum(tensor) for tensor in tensors])
            sums.tolist()
            times.append(time.perf_counter() - started)
        return sorted(times)[repeats // 2]

    taken = seconds()
    read = sum(tensor.nbytes for tensor in tensors)
    share = 1000 * taken / options.every / options.step_ms
    print(f"{device.type}: {1000 * taken:.2f} ms for {read / 2**30:.2f} GiB, {read / taken / 1e9:.0f} GB/s")
    print(f"every {options.every} steps of {options.step_ms:g} ms: {share:.3%} of the time")


if __name__ == "__main__":
    main()
