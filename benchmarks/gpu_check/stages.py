"""Stages of `benchmarks.gpu_check`: each yields what it measured, with a bound."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.page import BENCHMARKS
from benchmarks.common.timing import seconds_of, take_turns
from benchmarks.gpu_check.job import PLAIN, Plan
from benchmarks.lab.nodes import reaped
from benchmarks.lion_step import operations as ops
from lightning_commfree.comm.background import Staging
from lightning_commfree.diloco.codec import CODECS, decode_all
from lightning_commfree.diloco.exchange import FragmentMessage, Header

FITS = ("diloco", "diloco, outer_device", "lion", "lion, average", "domino")
GPT2 = (12, 768, 50257, 1024)  # blocks, width, vocabulary, positions: 124M parameters


class Machine(NamedTuple):
    """What is checked: a GPU, or a CPU that plays what it can, in sizes that time nothing."""

    device: str  # "cuda" | "cpu"
    kinds: Sequence[str] = FITS

    @property
    def is_gpu(self) -> bool:
        """Whether times and memory mean something."""
        return self.device == "cuda"


class Check(NamedTuple):
    """One line of the page; `holds` is None where the value is not judged."""

    what: str
    value: float | str
    bound: str
    holds: bool | None
    note: str = ""


def at_most(what: str, value: float, bound: float, note: str = "", judged: bool = True) -> Check:
    """Return a check of an upper bound."""
    return Check(what, value, f"at most {bound:g}", value <= bound if judged else None, note)


# -- one process


def triton(machine: Machine) -> Iterator[Check]:
    """Lion's Triton kernels compile for this GPU, and their results equal those of torch."""
    from lightning_commfree.lion import worker_triton

    start = time.perf_counter()
    worker_triton.try_out(machine.device)
    note = f"{time.perf_counter() - start:.1f} s"
    yield Check("Lion's Triton kernels, compared with torch", "equal", "equal", True, note)


# The test files with GPU tests that import nothing but torch, numpy, Lightning and pytest's own: to
# collect all of tests/ takes a minute, and needs what the recipes need.
GPU_TESTS = (
    "tests/comm/test_bits.py",
    "tests/comm/test_digest.py",
    "tests/diloco/test_fragment_exchange.py",
    "tests/diloco/test_wire.py",
    "tests/lion/test_optimizer.py",
    "tests/lion/test_worker.py",
    "tests/lion/test_worker_numba.py",
)
# pytest's options without `--strict-config`, which refuses the options of plugins that are missing
PYTEST = ("-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider")


def tests(machine: Machine) -> Iterator[Check]:
    """`pytest -m gpu`: bits, hashes, codes, means and votes have the CPU's bits."""
    done = subprocess.run(
        [sys.executable, *PYTEST, "-m", "gpu", *GPU_TESTS],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS.parent,
        timeout=300,
    )
    yield Check("`pytest -m gpu`", _last_line(done.stdout), "all pass", done.returncode == 0)


def kernels(machine: Machine) -> Iterator[Check]:
    """Encoding, decoding and averaging, compared with the time that their bytes take."""
    device, numel = torch.device(machine.device), 2**27 if machine.is_gpu else 2**14
    values = torch.randn(numel, device=device)
    other = torch.empty_like(values)
    table: dict[str, Callable[[], object]] = {"copy": lambda: other.copy_(values)}
    for name, codec in CODECS.items():
        payload = torch.empty(codec.num_bytes(numel), dtype=torch.uint8, device=device)
        table[f"{name} encode"] = partial(codec.encode, values, payload)
        table[f"{name} decode"] = partial(decode_all, codec, payload, other)
    message = FragmentMessage(CODECS["fp4"], numel, 0)
    messages = torch.empty(2, message.num_bytes, dtype=torch.uint8, device=device)
    for one in messages:
        message.write(one, Header(0, 1, 0), values, values[:0])
    table["mean and norms of 2 messages"] = partial(message.average, messages, [1, 1])
    timings = take_turns(table, 9, partial(seconds_of, device=device))

    bytes_per_s = 8 * numel / timings["copy"].seconds
    h100 = machine.is_gpu and "H100" in torch.cuda.get_device_name()
    fast = bytes_per_s > 2.3e12 if h100 else None
    yield Check("copy of fp32 values, GB/s", bytes_per_s / 1e9, "over 2300 on an H100", fast)
    # bytes per value, and how many times as long as they take
    floors = {"fp4": (4.5, 13, 8), "int8": (5, 8, 5), "bf16": (6, 1.5, 1.5), "fp32": (8, 1.3, 1.3)}
    bounds = {
        f"{name} {way}": (num_bytes, bound)
        for name, (num_bytes, *both) in floors.items()
        for way, bound in zip(("encode", "decode"), both, strict=True)
    }
    bounds["mean and norms of 2 messages"] = (5, 25)
    for name, (num_bytes, bound) in bounds.items():
        ratio = timings[name].seconds * bytes_per_s / (num_bytes * numel)
        note = f"{1e3 * timings[name].seconds:.2f} ms"
        yield at_most(f"{name}, times the floor of memory", ratio, bound, note, machine.is_gpu)


def lion(machine: Machine) -> Iterator[Check]:
    """A step of Distributed Lion, compared with fused AdamW."""
    device = torch.device(machine.device)
    shapes = ops.gpt2_shapes(*GPT2 if machine.is_gpu else (1, 16, 64, 8))
    table = ops.step_operations(shapes, device)
    timings = take_turns(table, 5, partial(seconds_of, device=device))
    host = {name: _host_seconds(table[name]) for name in (ops.CAST, ops.APPLY, ops.LION)}
    for name, seconds in host.items():
        ratio = timings[name].seconds / timings[ops.ADAMW_FUSED].seconds
        note = f"{1e3 * timings[name].seconds:.2f} ms, host {1e3 * seconds:.2f} ms"
        yield at_most(f"{name}, times fused AdamW", ratio, 2, note, machine.is_gpu)


def _host_seconds(operation: Callable[[], object]) -> float:
    """Return the median time until the call has returned, however much is queued."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - start)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return statistics.median(seconds)


def streams(machine: Machine) -> Iterator[Check]:
    """What is staged is what was there, whatever the training stream does meanwhile."""
    staging, spoiled = Staging(), 0
    for i in range(50):
        values = torch.full((2**14 + 4096 * i,), float(i), device=machine.device)
        for stream in staging._streams.values():
            with torch.cuda.stream(stream):  # late, so that memory is reused before
                torch.cuda._sleep(20_000_000)
        wait = staging.stage(lambda values=values: values * 2 + 1, [values])  # type: ignore[misc]
        expected, shape = 2.0 * i + 1, values.shape
        del values
        reused = [torch.full(shape, -1.0, device=machine.device) for _ in range(4)]
        spoiled += int(not bool((wait() == expected).all()))
        del reused
    yield at_most("staged payloads that were spoiled, of 50", spoiled, 0)
    if machine.is_gpu:
        yield Check("pinned memory that is read too early is seen", *_read_too_early())


def _read_too_early() -> tuple[str, str, bool]:
    side, host = torch.cuda.Stream(), torch.full((2**22,), -1.0, pin_memory=True)
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        host.copy_(torch.full((2**22,), 3.0, device="cuda"), non_blocking=True)
    seen = not bool((host == 3).all())
    torch.cuda.synchronize()
    return ("yes" if seen else "no"), "yes", seen


# -- fits


class Fit(NamedTuple):
    """What the ranks of a fit found and printed; a rank that failed has found None."""

    ranks: list[Any]
    outputs: list[str]
    folder: Path
    seconds_after: float  # from the end of the last process to the end of the first

    @property
    def completed(self) -> bool:
        """Whether every rank ended well."""
        return None not in self.ranks


def fit(
    plan: Plan,
    env: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    timeout_s: float = 300.0,
) -> Fit:
    """Run the processes of a plan."""
    folder = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(env or {})}
    command = [*wrapper, sys.executable, "-m", "benchmarks.gpu_check.job"]
    command += [json.dumps(asdict(plan)), str(folder)]
    logs = [folder / f"{rank}.log" for rank in range(plan.ranks)]
    ended: dict[int, float] = {}
    with ExitStack() as stack:
        jobs = []
        for rank, log in enumerate(logs):
            job = subprocess.Popen(
                command,
                env={**shared, "NODE_RANK": str(rank)},
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
                cwd=BENCHMARKS.parent,
                start_new_session=True,
            )
            stack.enter_context(reaped(job))
            jobs.append(job)
        deadline = time.monotonic() + timeout_s
        while len(ended) < len(jobs) and time.monotonic() < deadline:
            for rank, job in enumerate(jobs):
                if rank not in ended and job.poll() is not None:
                    ended[rank] = time.monotonic()
            time.sleep(0.02)

    # of several GPUs in one process, the first rank's
    found = [_read(folder / f"{rank * plan.gpus}.pt") for rank in range(plan.ranks)]
    after_s = ended.get(0, deadline) - ended.get(plan.ranks - 1, deadline)
    return Fit(found, [log.read_text(errors="replace") for log in logs], folder, after_s)


def _read(file: Path) -> Any:
    """Return what a rank has written, and delete it; None if it wrote nothing."""
    found = torch.load(file) if file.exists() else None
    file.unlink(missing_ok=True)
    return found


def fits(machine: Machine) -> Iterator[Check]:
    """Two ranks on one device train as on CPUs."""
    for kind in machine.kinds:
        here = fit(Plan(kind, machine.device))
        if not here.completed:
            yield _failed(kind, here)
            continue
        ours, other = here.ranks
        yield at_most(f"{kind}: ranks apart at the end", _apart(ours, other), 0)
        if machine.is_gpu:
            yield from _compared(kind, ours, fit(Plan(kind, "cpu")))


def _compared(kind: str, ours: Any, on_cpu: Fit) -> Iterator[Check]:
    if not on_cpu.completed:
        yield _failed(f"{kind} on CPUs", on_cpu)
        return
    difference = abs(ours["loss"] - on_cpu.ranks[0]["loss"])
    yield at_most(f"{kind}: loss, apart from CPUs", difference, 5e-3)
    same = ours["sent"] == on_cpu.ranks[0]["sent"]
    yield Check(f"{kind}: bytes by tag", "equal" if same else "differ", "as on CPUs", same)


def resume(machine: Machine) -> Iterator[Check]:
    """A fit that resumes in the middle of a cycle ends with the bits of an uninterrupted one."""
    whole = fit(Plan("diloco", machine.device, saves_at=13))
    again = fit(Plan("diloco", machine.device, resumes=str(whole.folder / "middle.ckpt")))
    if not (whole.completed and again.completed):
        yield _failed("diloco, resumed", again if whole.completed else whole)
        return
    apart = _apart(whole.ranks[0], again.ranks[0])
    yield at_most("diloco: resumed, apart from the fit in one piece", apart, 0)


def deaths(machine: Machine) -> Iterator[Check]:
    """A rank kills itself; the other one ends soon and names it."""
    for kind in machine.kinds:
        ended = fit(Plan(kind, machine.device, steps=10**6, dies_at=5))
        seconds, is_named = ended.seconds_after, "rank 1 is gone" in ended.outputs[0]
        yield at_most(f"{kind}: seconds until the other rank ends", seconds, 60)
        yield Check(f"{kind}: the error names rank 1", "yes" if is_named else "no", "yes", is_named)


def races(machine: Machine) -> Iterator[Check]:
    """Data races, by torch's CUDA sanitizer."""
    for kind in ("diloco", "lion"):
        plan = Plan(kind, "cuda", ranks=1, steps=16)
        found = fit(plan, {"TORCH_CUDA_SANITIZER": "1"})
        number = "CSAN detected" in found.outputs[0]
        yield at_most(f"{kind}: data races", number, 0) if found.completed else _failed(kind, found)


def memcheck(machine: Machine) -> Iterator[Check]:
    """Faults of memory, by NVIDIA's compute-sanitizer; may take a quarter of an hour."""
    if not shutil.which("compute-sanitizer"):
        yield Check("diloco: compute-sanitizer", "not installed", "0 errors", None)
        return
    plan = Plan("diloco", "cuda", ranks=1, steps=10, width=32, layers=1)
    found = fit(plan, wrapper=["compute-sanitizer", "--error-exitcode=9"], timeout_s=900)
    [summary] = re.findall("ERROR SUMMARY: .*", found.outputs[0])[-1:] or ["no summary"]
    yield Check("diloco: compute-sanitizer", summary, "0 errors", ": 0 errors" in summary)


def waits(machine: Machine) -> Iterator[Check]:
    """Places in the library where the host waits for the device (torch's sync debug mode)."""
    for kind, landings in (("diloco", 9), ("lion", 0)):  # Lion waits for events, which are not seen
        found = fit(Plan(kind, "cuda", lists_waits=True))
        if not found.completed:
            yield _failed(kind, found)
            continue
        places = Counter(p for p in found.ranks[0]["waits"] if "lightning_commfree" in p)
        note = ", ".join(f"{Path(place).name} x {count}" for place, count in places.items())
        yield at_most(f"{kind}: waits of the host in 24 steps", places.total(), 4 * landings, note)


def overhead(machine: Machine) -> Iterator[Check]:
    """Time and memory of a step on one rank, compared with AdamW: GPT-2 124M in bfloat16."""
    layers, width, vocabulary, positions = GPT2 if machine.is_gpu else (1, 16, 64, 8)
    make = partial(
        Plan,
        device=machine.device,
        ranks=1,
        steps=60 if machine.is_gpu else 12,
        sync_every=20 if machine.is_gpu else 8,
        layers=layers,
        width=width,
        vocabulary=vocabulary,
        positions=positions,
        batch=8,
        precision="bf16-mixed",
        exact=False,
    )
    base = fit(make(PLAIN))
    if not base.completed:
        yield _failed(PLAIN, base)
        return
    plain = base.ranks[0]
    plain_s = statistics.fmean(plain["seconds"])
    numel = sum(value.numel() for value in plain["state"].values())
    # times the step, and bytes per parameter above plain
    bounds = {"diloco": (1.02, 12), "diloco, outer_device": (1.2, 4), "lion": (1.05, 0)}
    for kind in machine.kinds:
        found, (slower, larger) = fit(make(kind)), bounds[kind]
        if not found.completed:
            yield _failed(kind, found)
            continue
        ratio = statistics.fmean(found.ranks[0]["seconds"]) / plain_s
        note = f"plain {1e3 * plain_s:.0f} ms"
        yield at_most(f"{kind}: mean step, times plain", ratio, slower, note, machine.is_gpu)
        more = (found.ranks[0]["peak_bytes"] - plain["peak_bytes"]) / numel
        yield at_most(f"{kind}: bytes per parameter more", more, larger, judged=machine.is_gpu)


def nccl(machine: Machine) -> Iterator[Check]:
    """Several GPUs with NCCL inside; a hang shows as a fit that did not end."""
    here = torch.cuda.device_count()
    for kind, gpus in (("domino", 2), ("domino, auto", 2), ("diloco, fsdp", 4), ("lion, nodes", 4)):
        what = f"{kind} on {gpus} GPUs"
        if gpus > here:
            yield Check(what, f"{here} GPUs here", "completes", None)
            continue
        plan = Plan(kind, "cuda", ranks=1, gpus=gpus, backend="nccl", steps=100)
        found = fit(plan)
        yield Check(what, "yes", "completes", True) if found.completed else _failed(what, found)


def _failed(what: str, failed: Fit) -> Check:
    texts = [_last_line(failed.outputs[r]) for r, found in enumerate(failed.ranks) if found is None]
    return Check(what, texts[0], "completes", False, f"logs in {failed.folder}")


def _apart(ours: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the largest difference of two ranks' weights."""
    states: tuple[dict[str, Tensor], dict[str, Tensor]] = ours["state"], other["state"]
    return max(
        float((tensor.double() - states[1][name].double()).abs().max())
        for name, tensor in states[0].items()
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:120] if lines else "no output"


Stage = Callable[[Machine], Iterator[Check]]
# most telling first
STAGES: dict[str, Stage] = {
    stage.__name__: stage
    for stage in (
        triton, kernels, streams, lion, overhead, fits, waits, deaths, resume, tests, races,
        memcheck, nccl,
    )
}  # fmt: skip
NEED_A_GPU = {"triton", "waits", "tests", "races", "memcheck", "nccl"}
# for a kind of fit, each of these is a part of its own
PER_KIND = {
    "overhead": ("diloco", "diloco, outer_device", "lion"),
    "fits": FITS,
    "deaths": ("diloco", "lion", "domino"),
}
