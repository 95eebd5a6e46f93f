"""state_dict() of a layer of experts is the same on every layout: a job of another size goes on from it. What moe.py calls."""

import torch
from dense_moe import EXPERTS, HIDDEN, WIDTH, state_of, tokens_of, whole_job

import weft

state = state_of(8, shared=True)


def layer(ep):
    return weft.nn.MoE(WIDTH, HIDDEN, EXPERTS, choices=2, shared=1, ep=ep, dtype=torch.float64)


def save(path):
    made = layer(ep=4)
    fresh = made.state_dict()
    assert set(fresh) == set(state), list(fresh)
    sums = torch.tensor([float(v.double().sum()) for v in fresh.values()], dtype=torch.float64)
    weft.broadcast(sums)
    assert sums.tolist() == [float(v.double().sum()) for v in fresh.values()], "initial values are rank 0's"
    made.load_state_dict(state)
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    for p in made.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    weft.save(made, path)


def load(path):
    rank, size = weft.rank(), weft.size()
    saved = torch.load(path, weights_only=True)
    expected = {name: value - 1 for name, value in state.items()}
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], expected[name]) for name in state)
    for ep in (1, size):
        made = layer(ep)
        made.load_state_dict(saved)
        whole = made.state_dict()
        assert list(whole) == list(saved) and all(torch.equal(whole[name], saved[name]) for name in saved)
        _, outs, _, _, _ = whole_job(saved, size, 2, 1.25)
        with torch.no_grad():
            out = made(tokens_of(rank, size)[0])
        assert out.numel() == 0 or float((out - outs[rank]).abs().max()) < 1e-12 * float(outs[rank].abs().max())
        for broken, says in (
            ({k: v for k, v in saved.items() if k != "experts.7.up.bias"}, "experts.7.up.bias"),
            ({**saved, "experts.8.up.bias": saved["experts.7.up.bias"]}, "experts.8.up.bias"),
        ):
            try:
                made.load_state_dict(broken)
            except RuntimeError as error:
                assert says in str(error), error
            else:
                raise AssertionError(says)
    if size > 1:
        try:
            made.load_state_dict({name: value + rank for name, value in saved.items()})
        except weft.UsageError as error:
            assert "is another one on rank" in str(error), error
        else:
            raise AssertionError("ranks loaded different states")
