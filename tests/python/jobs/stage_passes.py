"""What passes between stages is what training computes: its type under autocast, and not a forward, random number or count in a running mean more
than one process has. And modules that are compiled: as often with zb-h1 as with 1f1b."""

import functools

import torch
from stage_models import WIDTH, WORDS, batch_of, loss_of

import weft

torch.set_num_threads(1)
weft.init()
size = weft.size()
MICRO_BATCHES, STEPS = 4, 3


def distance(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))


class Layer(torch.nn.TransformerEncoderLayer):
    """In eval() and without gradients torch computes it by a fused function, which autocast does not know."""

    def __init__(self, dropout=0.0):
        super().__init__(WIDTH, nhead=2, dim_feedforward=16, dropout=dropout, batch_first=True)


def encoder():
    torch.manual_seed(0)
    return [torch.nn.Embedding(WORDS, WIDTH), Layer(), Layer(), torch.nn.Linear(WIDTH, WORDS)]


def autocast():
    """Gradients of one process that computes the same micro-batches. Everything is multiplied by powers of two alone: the bits are the same."""
    ids, targets = batch_of(0, 0, samples=8)
    targets = targets.clamp_min(0)  # (all count)
    whole = encoder()
    with torch.autocast("cpu", torch.bfloat16):
        for x, y in zip(ids.tensor_split(MICRO_BATCHES), targets.tensor_split(MICRO_BATCHES)):
            for module in whole:
                x = module(x)
            (loss_of(x, y) / MICRO_BATCHES).backward()
    expected = {f"{i}.{name}": p.grad for i, module in enumerate(whole) for name, p in module.named_parameters()}
    plain = {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for mode in (True, False):
            x = whole[0](ids)
            plain[mode] = whole[1].train(mode)(x).dtype
    assert plain[True] != plain[False], "control: in eval() it gives another type"
    for first in ("step", "evaluate"):
        pipe = weft.pipeline.Pipeline(encoder(), 2, loss_of, MICRO_BATCHES, layers=[2, 2])
        with torch.autocast("cpu", torch.bfloat16):
            if first == "evaluate":
                assert pipe.evaluate(ids, targets).isfinite()
            loss = pipe.step(ids, targets)
            gradients = {name: p.grad for name, p in pipe.named_parameters()}
            assert abs(pipe.evaluate(ids, targets) - loss) < 2**-5 * loss and pipe.training
        assert all(torch.equal(gradients[name], expected[name]) for name in gradients), first
        assert all(bool(g.any()) for g in gradients.values()), "control: there are some"
        assert abs(pipe.evaluate(ids, targets) - loss) < 2**-5 * loss  # float32 passes
        assert pipe.step(ids, targets).isfinite() and len(pipe._passed) == 4


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.drop = torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.drop(self.norm(self.mix(x).flatten(0, 1)).view(x.shape))


def counted_once():
    """Also where a step computes a new shape ahead: the bits of modules and random numbers are those of the same forwards in one process."""
    torch.manual_seed(1)
    here = [torch.nn.Embedding(WORDS, WIDTH), Counts()]
    torch.manual_seed(1)
    listed = [torch.nn.Embedding(WORDS, WIDTH), Counts(), Counts(), torch.nn.Linear(WIDTH, WORDS)]
    pipe = weft.pipeline.Pipeline(listed, 2, loss_of, MICRO_BATCHES, layers=[2, 2])
    for step, length in enumerate((5, 5, 3)):
        ids, targets = batch_of(0, step, samples=8, length=length)
        torch.manual_seed(step)
        before = torch.get_rng_state()
        pipe.step(ids, targets)
        if pipe.stage > 0:
            continue
        after = torch.get_rng_state()
        assert not torch.equal(before, after), "control: it takes some"
        torch.manual_seed(step)
        for x in ids.tensor_split(MICRO_BATCHES):
            here[1](here[0](x))
        assert torch.equal(after, torch.get_rng_state()), step
        names = dict(here[1].named_buffers())
        assert all(torch.equal(b, names[name]) for name, b in listed[1].named_buffers()) and listed[1].calls == here[1].calls, step
    calls, state = listed[1].calls, [b.clone() for b in pipe.buffers()]
    pipe.evaluate(ids, targets)
    assert all(torch.equal(a, b) for a, b in zip(state, pipe.buffers())) and (listed[1].calls - calls) in (0, MICRO_BATCHES)
    with torch.no_grad():
        pipe.step(ids, targets)  # it trains all the same
    assert all(bool(p.grad.any()) for name, p in pipe.named_parameters() if name.endswith("mix.weight"))


class Feed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class ByFunction(Feed):
    """Compiles what it calls: nobody sees that from outside."""

    def __init__(self):
        super().__init__()
        self.function = torch.compile(super().forward, backend=backend)

    def forward(self, x):
        return self.function(x)


graphs = []


def backend(graph, _):
    graphs.append(graph)
    return graph.forward


def compiled():
    ids, targets = batch_of(0, 0, samples=8)

    def in_place():
        out = Feed()
        out.compile(backend=backend)
        return out

    def trained(make, schedule, anew=False):
        """How often something was compiled, gradients, and products of second halves."""
        torch._dynamo.reset()
        graphs.clear()
        torch.manual_seed(2)
        listed = [torch.nn.Embedding(WORDS, WIDTH), make(), make(), torch.nn.Linear(WIDTH, WORDS)]
        pipe = weft.pipeline.Pipeline(listed, 2, loss_of, MICRO_BATCHES, layers=[2, 2], schedule=schedule)
        halves, products = pipe._walk.halves, []
        keep = halves.keep
        halves.keep = lambda product: products.append(1) or keep(product)
        for _ in range(STEPS):
            if anew:
                halves.forwards = {layer: functools.partial(halves._forward, layer) for layer in halves.forwards}
            pipe.step(ids, targets)
            pipe.evaluate(ids, targets)
        return len(graphs), [p.grad for p in pipe.parameters()], len(products)

    makes = {"plain": Feed, "module": lambda: torch.compile(Feed(), backend=backend), "in place": in_place, "function": ByFunction}
    head = STEPS * MICRO_BATCHES * (weft.rank() == size - 1)  # products of the last module, which is not compiled
    for how, make in makes.items():
        (once, expected, none), (again, found, products) = trained(make, "1f1b"), trained(make, "zb-h1")
        assert again == once and (once > 0) == (how != "plain"), (how, once, again)
        assert all(distance(a, b) < 1e-5 for a, b in zip(found, expected)), how
        assert none == 0 and products == head + (2 * STEPS * MICRO_BATCHES if how == "plain" else 0), (how, products)
    assert trained(ByFunction, "zb-h1", anew=True)[0] > once, "control: another forward in every step is compiled in every step"


autocast()
counted_once()
compiled()
