"""Ballots, votes and Lion's step on a CUDA device, walked without one.

What the walk does not see, and what stands there (`tests.cuda_seams`):

- the thread beside the training: its tasks run where their result is waited for, as "thread". What
  it counts lies in host memory, where no device is waited for: nothing of it is listed;
- pinned memory: copies are made, nothing runs beside anything, so that no race is seen;
- what headers say: they hold no values, so a summary is given. `read_headers` reads them
  in host memory;
- the ranks of a node, who only pass on what lies in host memory (`NodeBallotExchange`).
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.background import Staging, to_host
from lightning_commfree.comm.exchange import View
from lightning_commfree.lion import DistributedLion, LionSettings, ballot, worker
from lightning_commfree.lion.ballot import VoteHeaders
from lightning_commfree.lion.buckets import split_into_buckets
from lightning_commfree.lion.vote import Average, Majority, PackedDelta, Rule
from lightning_commfree.lion.worker import LionParam, cast_ballot, take_step
from tests.cuda_seams import memory, tasks_at_once
from tests.cuda_walk import CPU, CUDA, CudaWalk, InstantChannel, Question, is_walked
from tests.kernels import KernelCount
from tests.lion.training import BUCKETS, SHAPES, groups, parameters, small_buckets

STEPS = 2
Questions = set[Question]

# What a step waits for, by the step at which it happens, and why. Backward, in which the ballots
# are cast and leave, waits for nothing.
JOIN = {
    # Which bits are padding is found out once, in host memory.
    Question("join", "lion/voting.py __init__", "copy up"),
}
EVERY_STEP = {
    # The ballots have to be on the host before anybody can have counted them.
    Question("optimizer", "comm/background.py wait", "wait"),
}
# The thread waits for the same, before it sends them.
THREAD = {Question("thread", "comm/background.py wait", "wait")}
TIES = {
    # Ties are looked for where the votes are counted, which is in host memory under the strategy.
    Question("count", "lion/vote.py count", "value"),
}
VOTES: dict[str, dict[str, Any]] = {
    "majority": {},
    "random ties": {"ties": "random"},
    "average": {"vote": "average"},
}


class Worker:
    """Worker 0 of `size`, with parameters on the device.

    Args:
        patch: for the stand-ins.
        size: workers.
        zeros: how many votes of 0 the headers say that a worker has at most.
        abstaining: which workers the headers say to abstain.
        dtype: of the parameters.
        walk: if not a plain one.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        size: int,
        zeros: int = 0,
        abstaining: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        walk: CudaWalk | None = None,
    ) -> None:
        self.walk, self.size = walk or CudaWalk(), size
        values = {name: p.detach().to(dtype) for name, p in parameters().items()}
        self.model = nn.ParameterDict(values)

        def said(headers: Tensor, count: int) -> VoteHeaders:
            assert headers.device == CPU
            alike = {"parameters_differ": False, "hyperparameters_differ": False}
            gradients = (True,) * count
            return VoteHeaders(0, zeros, abstaining, (), gradients, **alike)

        patch.setattr(ballot, "read_headers", said)
        small_buckets(patch)
        memory(patch)
        tasks_at_once(patch, self.walk)

    def run(self, overlap: bool = True, **settings: Any) -> Questions:
        """Join the others and take some steps; return what was asked."""
        with self.walk:
            self.walk.on_cuda(self.model)
            named = [(name, self.model[name]) for name in SHAPES]
            lion = DistributedLion(groups(dict(named)))
            wanted = LionSettings(**{"check_drift_every": 1, **settings})
            channel: Any = InstantChannel(self.size, device=CPU)
            with self.walk.during("join"):
                voting = lion.join(named, View.of(channel), wanted)

            for _ in range(STEPS):
                loss = sum(p.float().square().sum() for _, p in named)
                assert isinstance(loss, Tensor)
                with self.walk.during("backward"):
                    if overlap:
                        with voting.during_backward():
                            loss.backward()
                        assert len(voting._flights) == len(BUCKETS), "all have left"
                    else:
                        loss.backward()
                with self.walk.during("optimizer"):
                    lion.step()

        state = [t for p in self.model.values() for t in lion.state[p].values()]
        assert all(is_walked(tensor) for tensor in (*self.model.values(), *state))
        return self.walk.asked()


@pytest.mark.parametrize("zeros", [0, 1, 10**6], ids=["dense", "list of zeros", "second plane"])
@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("size", [2, 3])
def test_a_step_waits_for_its_ballots_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, size: int, vote: str, zeros: int
) -> None:
    here = Worker(monkeypatch, size, zeros)
    assert here.run(**VOTES[vote]) == JOIN | EVERY_STEP | THREAD
    waits = Counter(q for q in here.walk.questions if q.step == "optimizer")
    assert waits == dict.fromkeys(EVERY_STEP, STEPS * len(BUCKETS)), "once for a bucket"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_masters_and_wide_parameters_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, overlap: bool
) -> None:
    asked = Worker(monkeypatch, 3, dtype=dtype).run(overlap)
    assert asked == JOIN | EVERY_STEP | THREAD


def test_kernels_wait_for_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Worker(monkeypatch, 3)
    names = ("cast", "update_values", "follow", "update_momentum")
    kernels = SimpleNamespace(**dict.fromkeys(names, lambda *_: None))
    monkeypatch.setattr(worker, "load_kernels", lambda module, users: kernels)
    assert here.run() == JOIN | EVERY_STEP | THREAD


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("who", [0, 1])
def test_an_abstaining_worker_waits_for_no_more(
    monkeypatch: pytest.MonkeyPatch, who: int, vote: str
) -> None:
    here = Worker(monkeypatch, 3, abstaining=(who,))
    assert here.run(nonfinite="abstain", **VOTES[vote]) == JOIN | EVERY_STEP | THREAD


def test_plain_lion_waits_for_its_own_ballot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Worker(monkeypatch, 1).run() == JOIN | EVERY_STEP


# By themselves


def draw(shard: int, words: int) -> Tensor:
    return torch.empty(words, dtype=torch.int64, device=CUDA)


RULES: dict[str, tuple[Rule, Questions]] = {
    "majority": (Majority(), TIES),
    "random ties": (Majority(draw), TIES),
    "average": (Average(), set()),
}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("workers", [1, 2, 3, 6])
def test_votes_are_counted_where_they_are(workers: int, name: str, tied: bool, zeros: bool) -> None:
    """Planes on the device: the code names none, and would count there too."""
    rule, expected = RULES[name]
    with CudaWalk({"lion/vote.py count": tied}) as walk:
        planes = torch.empty(3, workers, 8, dtype=torch.int64, device=CUDA)
        with walk.during("count"):
            shard = rule.count(planes[0], planes[1] if zeros else None, planes[2, 0], 0)
        assert is_walked(shard.planes)
        assert shard.ties is None or is_walked(shard.ties)
    assert walk.asked() == expected


@pytest.mark.parametrize("workers", [1, 3, 200])
@pytest.mark.parametrize("rule", [Majority(), Average()])
def test_delta_is_read_on_the_device(rule: Rule, workers: int) -> None:
    """Nobody waits; 200 workers need wider sums."""
    weights = rule.weights(workers, any_zeros=True)
    with CudaWalk() as walk:
        planes = torch.empty(len(weights), 64, dtype=torch.uint8, device=CUDA)
        delta = PackedDelta(planes, weights, rule.offset(workers))
        assert is_walked(delta.read(7, torch.empty(300, device=CUDA)))
    assert walk.questions == []


@pytest.mark.parametrize("tensors", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bucket_takes_few_kernels(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tensors: int
) -> None:
    """However many tensors it has, with copies to the host and back; once a tensor took 43."""
    memory(monkeypatch)
    exact = torch.float32
    with CudaWalk():
        members = []
        for i in range(tensors):
            parameter = nn.Parameter(torch.empty(9, 7, dtype=dtype, device=CUDA))
            parameter.grad = torch.empty_like(parameter)
            state = {k: torch.empty(9, 7, dtype=exact, device=CUDA) for k in ("momentum", "master")}
            if dtype == exact:
                del state["master"]
            group = {"lr": 0.1 * i, "betas": (0.9, 0.99), "weight_decay": 0.1}
            members.append(LionParam(parameter, state, group))
        named = [(str(i), member.parameter) for i, member in enumerate(members)]
        (bucket,) = split_into_buckets(named[::-1], 3)
        valid = torch.empty(bucket.plane_bytes, dtype=torch.uint8, device=CUDA)
        planes = torch.empty(2, bucket.plane_bytes, dtype=torch.uint8)
        with KernelCount() as cast:
            to_host(cast_ballot(bucket, members, valid, 0, 0))
        with KernelCount() as step:
            uploaded = planes.pin_memory().to(CUDA, non_blocking=True)
            delta = PackedDelta(uploaded, (2, 1), 1)
            take_step(bucket, members, delta, (True,) * tensors, abstained=False)
    most = 50 if dtype == exact else 56  # master copies follow what hooks have changed
    assert (cast.kernels + step.kernels).total() <= most, (cast.kernels, step.kernels)


# The tests above can fail.


@pytest.mark.parametrize(
    ("function", "during"), [("_directions", "backward"), ("_update_momenta", "optimizer")]
)
def test_a_planted_item_is_seen(
    monkeypatch: pytest.MonkeyPatch, function: str, during: str
) -> None:
    whole = getattr(worker, function)

    def planted(*args: Any) -> Any:
        run = args[0]
        run[0].momentum.sum().item()
        return whole(*args)

    monkeypatch.setattr(worker, function, planted)
    asked = Worker(monkeypatch, 2).run()
    here = "tests/lion/test_cuda_walk_lion.py planted"
    assert Question(during, here, "value") in asked


def test_a_result_left_in_host_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "upload", lambda _, host, device, work: lambda: work(host))
    with pytest.raises(RuntimeError, match=r"cuda:1.*cpu|cpu and cuda:1"):
        Worker(monkeypatch, 2).run()
