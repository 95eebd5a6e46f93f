#!/usr/bin/env python3
"""weft's selection with error feedback beside the same step written with torch.topk, in one run, interleaved, one thread.

    bench/select_against_torch.py build/release/bench/bench_select

Needs torch (pip install torch==2.13.0). The torch step is what a user writes: acc = gradient + residual; topk of |acc|; values by
gather; residual = acc with the chosen places zero. 25 M gaussian float32, k = 1 %.
"""

import json
import statistics
import subprocess
import sys
import time

import torch

LENGTH = 25_000_000
K = LENGTH // 100
ROUNDS = 5


def weft_seconds(program: str) -> float:
    """Median of one block on gaussian data, as bench_select reports it."""
    out = subprocess.run([program, "--benchmark_filter=^select/gaussian/1/", "--benchmark_format=json"], check=True,
                         capture_output=True, text=True).stdout
    (row,) = json.loads(out)["benchmarks"]
    return 1e-3 * (row["estimate_ms"] + row["accumulate_ms"] + row["cut_ms"])


def torch_step(gradient: torch.Tensor, residual: torch.Tensor) -> float:
    start = time.perf_counter()
    acc = gradient + residual
    _, indices = torch.topk(acc.abs(), K, sorted=False)
    acc[indices]  # the values that are sent
    acc[indices] = 0.0
    residual.copy_(acc)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    gradient = torch.randn(LENGTH)
    residual = torch.randn(LENGTH)
    torch_times, weft_times = [], []
    for _ in range(ROUNDS):
        torch_times.append(torch_step(gradient, residual.clone()))
        weft_times.append(weft_seconds(sys.argv[1]))
    mine, theirs = statistics.median(weft_times), statistics.median(torch_times)
    print(f"weft {1e3 * mine:.1f} ms, torch.topk {1e3 * theirs:.1f} ms, {theirs / mine:.1f} times; "
          f"{LENGTH} float32, k = {K}, one thread, torch {torch.__version__}, medians of {ROUNDS}")


if __name__ == "__main__":
    main()
