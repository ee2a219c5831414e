"""How fast codes are packed and unpacked, against copying the codes.

Run it as `python -m benchmarks.bits`; `--help` lists the options. The operations take turns,
so that what else the machine does meets all of them alike. The ratio is an operation's median time
over the median time of copying the unpacked codes, one byte each, from one buffer to another.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.common.timing import seconds_of, take_turns
from lightning_commfree.comm.bits import (
    pack_bits,
    pack_nibbles,
    packed_bits_size,
    packed_nibbles_size,
    unpack_bits,
    unpack_nibbles,
)

COPY = "copy"


def operations(numel: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the copy and the four operations on `numel` codes, each into a buffer of its own."""
    flags = torch.rand(numel, device=device) > 0.5
    codes = torch.randint(0, 16, (numel,), dtype=torch.uint8, device=device)
    bits = torch.empty(packed_bits_size(numel), dtype=torch.uint8, device=device)
    nibbles = torch.empty(packed_nibbles_size(numel), dtype=torch.uint8, device=device)
    flags_out, codes_out, copy_out = (torch.empty_like(t) for t in (flags, codes, codes))
    return {
        COPY: lambda: copy_out.copy_(codes),
        "pack_bits": lambda: pack_bits(flags, out=bits),
        "unpack_bits": lambda: unpack_bits(bits, numel, out=flags_out),
        "pack_nibbles": lambda: pack_nibbles(codes, out=nibbles),
        "unpack_nibbles": lambda: unpack_nibbles(nibbles, numel, out=codes_out),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure with the options in `argv` (None: of the command line) and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bits", description=__doc__)
    parser.add_argument("--numel", type=int, default=2**24, help="number of codes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds (%(default)s)")
    parser.add_argument("--device", type=torch.device, default="cpu", help="%(default)s or cuda")
    args = parser.parse_args(argv)
    if args.numel < 1 or args.rounds < 1:
        parser.error(f"numel={args.numel} and rounds={args.rounds} must both be 1 or more")

    hardware = platform.machine()
    if args.device.type == "cuda":
        hardware = torch.cuda.get_device_name(args.device)
    print(
        f"{args.numel} codes, {args.rounds} rounds, {hardware}, torch {torch.__version__},"
        f" {torch.get_num_threads()} threads"
    )
    print(f"{'operation':<16}{'median ms':>12}{'Gcode/s':>10}{'ratio to copy':>16}")
    table = operations(args.numel, args.device)
    timings = take_turns(table, args.rounds, partial(seconds_of, device=args.device))
    for name, (median_s, ratio) in timings.items():
        giga_codes = args.numel / median_s / 1e9
        print(f"{name:<16}{1e3 * median_s:>12.3f}{giga_codes:>10.2f}{ratio:>16.2f}")


if __name__ == "__main__":
    main()
