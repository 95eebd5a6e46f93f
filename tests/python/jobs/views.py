"""Gradients are views of buckets, whatever is done to p.grad; what cannot be a view is copied. Averages are exact on two ranks.

Every case is compared with a model of the same weights that knows nothing of weft: its gradients, summed over the ranks and halved,
are the averages bit by bit (a sum of two numbers has no order, and half of it no rounding).
"""

import contextlib

import torch
from models import batch, mlp

import weft

weft.init()
rank, size = weft.rank(), weft.size()
assert size == 2


def model_of(dtype):
    torch.manual_seed(11)
    return torch.nn.Sequential(mlp(3), torch.nn.Unflatten(1, (4, 1, 1)), torch.nn.Conv2d(4, 4, (1, 1)), torch.nn.Flatten()).to(dtype)


def wrapped_of(dtype=torch.float32, change=lambda module: module, **options):
    return weft.DataParallel(change(model_of(dtype)), **{"scheme": "dense", "bucket_mib": 0.005, **options})


def loss_of(model, step, dtype):
    x, y = batch(step, rank, dtype=dtype)
    return (model(x) - y).square().mean()


def averages(steps, dtype=torch.float32):
    """Of the sum over the steps, by a plain model and weft's all-reduce."""
    plain = model_of(dtype)
    for step in steps:
        loss_of(plain, step, dtype).backward()
    out = []
    for p in plain.parameters():
        total = p.grad.float()
        weft.all_reduce(total)
        out.append((total / size).to(dtype))
    return out


def same(model, expected):
    return all(p.grad is not None and torch.equal(p.grad, e) for p, e in zip(model.module.parameters(), expected))


def are_views(model):
    """Every gradient lies in a bucket, and buckets are what there is memory of."""
    grads = [p.grad for p in model.module.parameters()]
    mine = [g.data_ptr() == v.data_ptr() for g, v in zip(grads, model.compression.views)]
    storages = {g.untyped_storage().data_ptr() for g in grads}
    assert all(mine) == (len(storages) == model.compression.num_buckets < len(grads)), (mine, len(storages))
    return all(mine)


def backward(model, step, dtype=torch.float32):
    loss_of(model, step, dtype).backward()


def zero_grad_both_ways():
    for to_none in (True, False):
        model = wrapped_of()
        for step in range(3):
            model.zero_grad(set_to_none=to_none)
            backward(model, step)
            assert same(model, averages([step])) and are_views(model), (to_none, step)
        assert not same(model, averages([0])), "control: another step's averages"
    model = wrapped_of()
    for step in range(2):
        loss = loss_of(model, step, torch.float32)  # forward comes before zero_grad
        model.zero_grad()
        loss.backward()
        assert same(model, averages([step])) and are_views(model)


def sparse_schemes_too():
    model = wrapped_of(scheme="spardl", density=1.0)  # all of it: nothing stays behind
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        assert same(model, averages([step])) and are_views(model)
    model = wrapped_of(scheme="spardl", density=0.05, dense_below=0)
    backward(model, 0)
    assert are_views(model) and not same(model, averages([0]))
    assert any(p.grad.eq(0).any() for p in model.parameters())


def accumulation():
    """Several backwards and one exchange, with zero_grad both ways; control: an exchange too many."""
    expected = averages([0, 1, 2])
    for to_none in (True, False):
        model = wrapped_of()
        for _ in range(2):
            model.zero_grad(set_to_none=to_none)
            for step in range(3):
                with model.no_sync() if step < 2 else contextlib.nullcontext():
                    backward(model, step)
            assert same(model, expected) and are_views(model)
        assert model.compression.step == 2
    model = wrapped_of()
    for step in range(3):
        backward(model, step)
    assert not same(model, expected), "control: averages of averages"
    model = wrapped_of()
    with model.no_sync():
        for step in range(3):
            backward(model, step)
    assert not same(model, expected) and model.compression.step == 0, "control: nothing was exchanged"


def replaced_gradients():
    model = wrapped_of()
    parameters = list(model.module.parameters())
    # One tensor for each, put there before forward: it stays, and gets the average.
    own = [torch.zeros_like(p) for p in parameters]
    for p, g in zip(parameters, own):
        p.grad = g
    backward(model, 0)
    assert all(p.grad is g for p, g in zip(parameters, own)) and same(model, averages([0])) and not are_views(model)
    # Views of somebody's flat vector, put there between forward and backward.
    model.zero_grad()
    flat = torch.zeros(sum(p.numel() for p in parameters))
    loss = loss_of(model, 1, torch.float32)
    first = 0
    for p in parameters:
        p.grad = flat[first : first + p.numel()].view_as(p)
        first += p.numel()
    loss.backward()
    assert torch.equal(flat, torch.cat([g.flatten() for g in averages([1])])) and not are_views(model)
    model.zero_grad()
    backward(model, 2)
    assert are_views(model) and same(model, averages([2]))


def not_contiguous():
    model = wrapped_of(change=lambda module: module.to(memory_format=torch.channels_last))
    weight = model.module[2].weight
    weight.data = weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    assert not weight.is_contiguous()
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        expected = averages([step])
        for p, e in zip(model.module.parameters(), expected):
            # The operations on another memory format round in another order.
            assert torch.allclose(p.grad, e, rtol=1e-5, atol=1e-7)
        assert weight.grad.data_ptr() != model.compression.views[6].data_ptr()


def short_types():
    for dtype in (torch.bfloat16, torch.float16):
        model = wrapped_of(dtype)
        for step in range(2):
            model.zero_grad(set_to_none=step == 0)
            backward(model, step, dtype)
            assert all(p.grad.dtype == dtype for p in model.parameters())
            assert same(model, averages([step], dtype)), dtype
        assert not same(model, averages([0], dtype)), "control"
    mixed = weft.DataParallel(torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Linear(8, 4, dtype=torch.bfloat16)), scheme="dense")
    x, _ = batch(0, rank, dtype=torch.float32)
    mixed.module[1](mixed.module[0](x).bfloat16()).sum().backward()
    mine = [p.grad.float() for p in mixed.parameters()]
    both = [g.clone() for g in mine]
    for g in both:
        weft.all_reduce(g)
    assert all(torch.equal(a * size, b) for a, b in zip(mine, both)), "the same on both ranks"


zero_grad_both_ways(), sparse_schemes_too(), accumulation(), replaced_gradients(), not_contiguous(), short_types()
