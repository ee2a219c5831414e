"""Muon and AdamW in one optimizer take the steps of torch's two, and save and load like one."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from recipes.training.muon import MuonAdamW, muon_cosine
from recipes.training.optimizer import hidden_matrices, lion_cosine
from tests.fit.causal_lm import make

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
RATE = {"lr": 0.01, "weight_decay": 0.1}


class Net(nn.Module):
    """Two hidden matrices, one of them wide, beside an embedding and biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        matrices = hidden_matrices(self)
        return matrices, [p for p in self.parameters() if all(p is not m for m in matrices)]


def steps(net: Net, optimizers: list[torch.optim.Optimizer], first: int, last: int) -> None:
    for step in range(first, last):
        rows = torch.arange(step, step + 3) % 5
        net.zero_grad()
        net.layers(net.embedding(rows)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def values(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@needs_muon
def test_steps_are_those_of_muon_and_adamw_bit_for_bit() -> None:
    ours, theirs, adamw_only = Net(), Net(), Net()
    matrices, others = theirs.parts()
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", momentum=0.9, **RATE)
    steps(theirs, [muon, torch.optim.AdamW(others, betas=(0.9, 0.95), **RATE)], 0, 6)
    steps(ours, [MuonAdamW(*ours.parts(), momentum=0.9, **RATE)], 0, 6)
    assert torch.equal(values(ours), values(theirs))

    steps(adamw_only, [torch.optim.AdamW(adamw_only.parameters(), **RATE)], 0, 6)
    assert not torch.equal(values(ours), values(adamw_only)), "the mistake that would be seen"


@needs_muon
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_saved_optimizer_continues_bit_for_bit(how: str) -> None:
    whole, net = Net(), Net()
    steps(whole, [MuonAdamW(*whole.parts(), **RATE)], 0, 8)

    optimizer = MuonAdamW(*net.parts(), **RATE)
    steps(net, [optimizer], 0, 4)
    if how == "state_dict":
        file = io.BytesIO()
        torch.save([net.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        net_state, optimizer_state = torch.load(file, weights_only=True)
        net = Net()
        net.load_state_dict(net_state)
        optimizer = MuonAdamW(*net.parts(), lr=1.0)
        optimizer.load_state_dict(optimizer_state)
    elif how == "pickle":
        net, optimizer = pickle.loads(pickle.dumps((net, optimizer)))
    else:
        net, optimizer = copy.deepcopy((net, optimizer))
    steps(net, [optimizer], 4, 8)
    assert torch.equal(values(net), values(whole))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_embeddings_heads_norms_and_biases_are_adamws(kind: str) -> None:
    model = nn.ModuleDict({"model": make(kind)})
    named = {p: name for name, p in model.named_parameters()}
    found = {named[p].split(".")[-2] for p in hidden_matrices(model)}
    expected = {
        "gpt2": {"c_attn", "c_proj", "c_fc"},
        "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    }
    assert found == expected[kind], "no wte, wpe, lm_head, embed_tokens, norm or bias"


@needs_muon
def test_the_schedule_moves_both_learning_rates() -> None:
    made = muon_cosine(Net(), 10, lr=1.0, adamw_lr=0.5, warmup_steps=2, weight_decay=0.3)
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5, 0.5]


def test_lions_newton_schulz_is_of_hidden_matrices_only() -> None:
    net = Net()
    *plain, muon = lion_cosine(net, 10, ns_steps=5, weight_decay=0.3)["optimizer"].param_groups
    assert [group["ns_steps"] for group in (*plain, muon)] == [0, 0, 5]
    assert [group["weight_decay"] for group in (*plain, muon)] == [0.3, 0.0, 0.3]
    assert [p.ndim for p in muon["params"]] == [2, 2]
    assert plain[0]["params"] == [net.embedding.weight]


def test_an_old_torch_is_refused_with_the_version_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match=r"Muon needs torch 2\.9 or newer, and this is torch 2\."):
        MuonAdamW(*Net().parts())
