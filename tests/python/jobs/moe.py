"""weft.nn.MoE on several ranks, some without tokens, equals one process that computes every token by plain loops: results, losses,
gradients of everything, on every layout. float64: 1e-12 relative, because only the order of additions differs. Then its state: 4 ranks
save it to PATH, others load it."""

import collections
import json
import math
import os
import sys
import warnings

import moe_bad
import moe_state
import torch
from dense_moe import EXPERTS, HIDDEN, LONELY, WIDTH, state_of, tokens_of, whole_job
from torch.utils.checkpoint import checkpoint

import weft

weft.init(trace=f"{sys.argv[1]}.{os.environ.get('WORLD_SIZE', '1')}")
rank, size = weft.rank(), weft.size()
WEIGHTS = (0.3, 0.2)


def distance(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp_min(1)) if b.numel() else 0.0


def made(state, **options):
    options = {"balance_loss": WEIGHTS[0], "z_loss": WEIGHTS[1], **options}
    layer = weft.nn.MoE(WIDTH, HIDDEN, EXPERTS, dtype=torch.float64, **options)
    layer.load_state_dict(state)
    return layer


def check(layer, gradients, scale=1.0):
    """Of the parameters that this rank has; experts without a token have zeros."""
    for name, p in layer.named_parameters():
        error = distance(p.grad, scale * gradients[name])
        assert error < 1e-12, (name, error)
    for e in layer.experts.numbers():
        assert e != str(LONELY) or all(bool(p.grad.eq(0).all()) for p in layer.experts[e].parameters())


def layouts():
    return [ep for ep in (1, 2, 4, 8) if ep <= size]


def equality():
    dropped_somewhere = 0
    for choices in (1, 2):
        for factor in (1.25, 0.0):
            state = state_of(3, shared=choices == 2)
            loss, outs, gradients, of_tokens, dropped = whole_job(state, size, choices, factor, WEIGHTS)
            dropped_somewhere += sum(dropped)
            _, _, wrong, _, _ = whole_job(state, size, choices, factor, WEIGHTS, own_fractions=True)
            for ep in layouts():
                for slices in (1, 3):
                    layer = made(state, choices=choices, capacity_factor=factor, slices=slices, ep=ep, shared=int(choices == 2))
                    net = weft.DataParallel(layer, scheme="dense")
                    x, y = tokens_of(rank, size)
                    x.requires_grad_()
                    out = net(x)
                    assert distance(out.detach(), outs[rank]) < 1e-12, (choices, factor, ep, slices)
                    assert layer.dropped == dropped[rank]
                    aux = weft.nn.moe_loss(net)
                    assert abs(aux.item() - loss) < 1e-12 * max(1, abs(loss)), (aux.item(), loss)
                    ((out * y).sum() + aux).backward()
                    check(layer, gradients)
                    assert distance(x.grad, of_tokens[rank]) < 1e-12
                    if size == 4:  # controls (of two ranks only one has tokens)
                        assert distance(layer.gate.weight.grad, wrong["gate.weight"]) > 1e-6, "own fractions would be seen"
                        if ep > 1 and size > ep:
                            name, p = max(layer.experts.named_parameters(), key=lambda each: float(each[1].grad.abs().max()))
                            assert distance(p.grad * size / (size // ep), gradients[f"experts.{name}"]) > 1e-3, "and a division by replicas"
    assert dropped_somewhere > 0


def clipping():
    state = state_of(4)
    _, _, gradients, _, _ = whole_job(state, size, 2, 1.25, WEIGHTS)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    for ep in layouts():
        layer = made(state, choices=2, ep=ep)
        net = weft.DataParallel(layer, scheme="dense")
        x, y = tokens_of(rank, size)
        ((net(x) * y).sum() + layer.loss).backward()
        found = float(weft.clip_grad_norm_(net.parameters(), 0.25 * norm))
        assert abs(found - norm) < 1e-12 * norm, (ep, found, norm)
        check(layer, gradients, scale=0.25 * norm / (norm + 1e-6))
        mine = math.sqrt(sum(float(p.grad.square().sum()) for p in layer.parameters()))
        assert ep == 1 or abs(mine - 0.25 * norm) > 1e-3 * norm, "control: torch's own counts what is here"


def clipping_beside_a_table():
    """Tokens are rows of a sharded table: its columns count once, too."""
    state = state_of(4)
    values = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = [torch.arange(3 * r, 3 * r + 4) % 10 for r in range(size)]
    ys = [torch.ones(4, WIDTH, dtype=torch.float64) * (r + 1) for r in range(size)]
    _, _, gradients, of_tokens, _ = whole_job(state, size, 1, 0.0, WEIGHTS, inputs=[(values[i], y) for i, y in zip(ids, ys)])
    table = torch.zeros_like(values)
    for i, gradient in zip(ids, of_tokens):
        table.index_add_(0, i, gradient / size)
    norm = math.sqrt(sum(float(g.square().sum()) for g in [*gradients.values(), table]))
    model = torch.nn.Sequential(weft.nn.Embedding.from_pretrained(values, freeze=False), made(state, capacity_factor=0.0))
    net = weft.DataParallel(model, scheme="dense")
    optimizer = weft.optim.hybrid(torch.optim.SGD(model.parameters(), lr=1.0), clips=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ((net(ids[rank]) * ys[rank]).sum() + weft.nn.moe_loss(model)).backward()
    found = float(weft.clip_grad_norm_(net.parameters(), 0.5 * norm))
    assert abs(found - norm) < 1e-12 * norm, (found, norm)
    optimizer.step()
    whole = model.state_dict()
    assert distance(whole["0.weight"], values - 0.5 * table) < 1e-6  # (torch's 1e-6 beside the norm)
    assert all(distance(whole[f"1.{name}"], state[name] - 0.5 * gradients[name]) < 1e-6 for name in state)


def nobody_has_tokens():
    for factor in (1.25, 0.0):
        layer = weft.nn.MoE(WIDTH, HIDDEN, EXPERTS, capacity_factor=factor, shared=1, dtype=torch.float64)
        net = weft.DataParallel(layer, scheme="dense")
        out = net(torch.empty(0, WIDTH, dtype=torch.float64))
        assert out.shape == (0, WIDTH) and layer.loss.item() == 0
        (out.sum() + layer.loss).backward()
        assert all(bool(p.grad.eq(0).all()) for p in layer.parameters())


def recomputed():
    """Inside of torch.utils.checkpoint, of both kinds."""
    layer = made(state_of(7), choices=2)
    net = weft.DataParallel(layer, scheme="dense")
    x, y = tokens_of(rank, size)
    (net(x) * y).sum().backward()
    plain = [p.grad.clone() for p in layer.parameters()]
    for reentrant in (True, False):
        layer.zero_grad()
        (checkpoint(net, x.clone().requires_grad_(), use_reentrant=reentrant) * y).sum().backward()
        assert all(distance(p.grad, g) < 1e-12 for p, g in zip(layer.parameters(), plain)), reentrant


def calls():
    """A layer that is called twice before backward, a forward without one between them, gradients that gather over two backwards."""
    state = state_of(5)
    inputs = [tokens_of(r, size, seed=1) for r in range(size)], [tokens_of(r, size, seed=2) for r in range(size)]
    expected = [whole_job(state, size, 1, 1.25, (0, 0), inputs=each)[2] for each in inputs]
    sums = {name: 2 * (expected[0][name] + expected[1][name]) for name in state}
    for ep in layouts():
        layer = made(state, ep=ep, slices=2)
        net = weft.DataParallel(layer, scheme="dense")
        for last in (False, True):
            with net.no_sync() if not last else torch.enable_grad():
                (a, ya), (b, yb) = inputs[0][rank], inputs[1][rank]
                first, second = net(a), net(b)
                with torch.no_grad():
                    assert torch.equal(layer(a), first)
                ((first * ya).sum() + (second * yb).sum()).backward()
        check(layer, sums)
        out = layer(a)
        (out * ya).sum().backward(retain_graph=True)
        try:
            (out * ya).sum().backward()
        except weft.UsageError as error:
            assert "backward passes once" in str(error), error
        else:
            raise AssertionError("a second backward of a call")


def jitter_and_factories():
    state = state_of(6)
    torch.manual_seed(100 + rank)
    noise = []
    for r in range(size):
        with torch.random.fork_rng():
            torch.manual_seed(100 + r)
            noise.append(torch.empty_like(tokens_of(r, size)[0]).uniform_(0.8, 1.2))
    _, outs, gradients, _, _ = whole_job(state, size, 1, 1.25, WEIGHTS, noise=noise)

    class Expert(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(WIDTH, HIDDEN, dtype=torch.float64), torch.nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.seen += len(x)
            return self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))

    losses = {"balance_loss": WEIGHTS[0], "z_loss": WEIGHTS[1]}
    layer = weft.nn.MoE(WIDTH, experts=EXPERTS, expert=lambda _: Expert(), jitter=0.2, **losses, dtype=torch.float64)
    layer.load_state_dict({**state, **{f"experts.{e}.seen": torch.zeros((), dtype=torch.float64) for e in range(EXPERTS)}})
    net = weft.DataParallel(layer, scheme="dense")
    torch.manual_seed(100 + rank)
    x, y = tokens_of(rank, size)
    out = net(x)
    assert distance(out.detach(), outs[rank]) < 1e-12
    ((out * y).sum() + layer.loss).backward()
    check(layer, gradients)
    whole = layer.state_dict()
    capacity = sum(math.ceil(1.25 * len(tokens_of(r, size)[0]) / EXPERTS) for r in range(size))
    replicas = size // layer.ep
    assert float(whole["experts.0.seen"]) == capacity if replicas == 1 else True  # empty places are rows, too
    assert layer.load.sum() == sum(len(tokens_of(r, size)[0]) for r in range(size))
    assert layer.load[LONELY] == 0
    # In evaluation there is no jitter, and nothing is learned.
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x))
        assert float(layer.loss) > 0


def half():
    """Rows of bfloat16 travel as float32; under autocast the gate stays float32."""
    layer = weft.nn.MoE(WIDTH, HIDDEN, EXPERTS).to(torch.bfloat16)
    x = tokens_of(rank, size)[0].to(torch.bfloat16).requires_grad_()
    out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and layer.experts[layer.experts.numbers()[0]].up.weight.grad.dtype == torch.bfloat16
    layer = weft.nn.MoE(WIDTH, HIDDEN, EXPERTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(tokens_of(rank, size)[0].float())
    assert out.dtype == torch.float32 and layer.loss.dtype == torch.float32
    (out.sum() + layer.loss).backward()


exchanged = collections.Counter()


def count(layer, given, out):
    """What a call sends: each of its slices out and home, nothing where all experts are here."""
    if isinstance(layer, weft.nn.MoE) and layer.ep > 1:
        exchanged["forward"] += layer.slices
        exchanged["backward"] += layer.slices if out.requires_grad else 0


def traced():
    """Four all-to-alls a call, in slices, and no other."""
    weft.barrier()
    weft.shutdown()
    with open(f"{sys.argv[1]}.{size}/trace.rank{rank}.json") as file:
        begun = collections.Counter(e["name"] for e in json.load(file)["traceEvents"] if e["ph"] == "b" and e["cat"] == "blocking")
    assert begun["dispatch"] == begun["combine"] == exchanged["forward"], (begun, exchanged)
    assert begun["gradients of combine"] == begun["gradients of dispatch"] == exchanged["backward"], (begun, exchanged)
    assert (exchanged["backward"] > 0) == (size > 1)


torch.nn.modules.module.register_module_forward_hook(count)
equality()
clipping()
clipping_beside_a_table()
nobody_has_tokens()
calls()
jitter_and_factories()
half()
if size == 4:
    recomputed()
    moe_state.save(sys.argv[1])
    moe_bad.refusals()
    moe_bad.broken_gate()
else:
    moe_state.load(sys.argv[1])
    traced()
