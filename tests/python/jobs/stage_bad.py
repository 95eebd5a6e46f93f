"""What a pipeline refuses, and what it says where ranks disagree or a module breaks: sentences on all ranks, and nothing hangs. What stages.py
calls on 4 ranks."""

import copy
import pickle
import time

import torch
from stage_models import LENGTH, TIED, WORDS, Block, batch_of, counted, loss_of, modules

import weft
from weft._stage_walk import Passed


def said(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was said")


def made(listed=None, stages=2, micro_batches=4, **options):
    return weft.pipeline.Pipeline(modules() if listed is None else listed, stages, loss_of, micro_batches, **options)


class Extra(torch.nn.Identity):
    def get_extra_state(self):
        return {"seen": 1}


def refusals():
    rank = weft.rank()
    for options, says in (
        ({"stages": 3}, "3 stages do not divide 4 ranks"),
        ({"stages": 0}, "at least one stage"),
        ({"stages": 4, "listed": modules()[:3]}, "has 3 layers, too few for 4 stages"),
        ({"layers": [3, 4]}, "together the model's 8"),
        ({"layers": [8, 0]}, "at least one layer"),
        ({"layers": [2, 2, 4]}, "so many for each of 2"),
        ({"micro_batches": 0}, "at least one micro-batch"),
        ({"schedule": "interleaved", "chunks": 2, "micro_batches": 3}, "multiple of its 2 stages"),
        ({"schedule": "1f1b", "chunks": 2}, "chunks are of the schedule interleaved"),
        ({"schedule": "2f2b"}, "'2f2b'"),
        ({"backward_rank": -1}, "1 or more columns"),
        ({"backward_rank": 2}, "float32 only"),
        ({"backward_bits": 5}, "4 or 8 bits"),
        ({"backward_bits": 4}, "float32 only"),
        ({"backward_bits": 4, "backward_rank": 2}, "not as both"),
        ({"backward_messages": "some"}, "'some'"),
        ({"backward_messages": "8/1:0-3"}, "are of 8 micro-batches, and a step has 4"),
        ({"backward_messages": "4/7:0-1"}, "chunks that send gradients back are 1 to 1"),
        ({"listed": [*modules()[:7], torch.nn.Linear(8, WORDS, dtype=torch.complex64)]}, "the gradient of '7.weight' is complex64"),
        ({"stages": 1, "backward_rank": 2}, "there is one stage"),
        ({"stages": 1, "backward_bits": 8}, "backward_bits is of what goes back between stages, and there is one stage"),
        ({"compressed_stages": 3}, "compressed stages are 0 to 2"),
        ({"scheme": "spardll"}, "'spardll'"),
        ({"scheme": "spardl"}, "float64"),
        ({"clip_local": 1.0}, "clip_local does not go with stages"),
        ({"momentum_correction": 0.9}, "momentum_correction does not go with stages"),
        ({"find_unused": True}, "find_unused does not go with stages"),
        ({"densiti": 1.0}, "'densiti'"),
        ({"not_finite": "maybe"}, "not_finite is one of"),
        ({"tied": [("0.weight", "9.weight")]}, "no parameter '9.weight'"),
        ({"tied": [("0.weight", "1.mix.weight")]}, "parameters of one shape"),
        ({"listed": [*modules(), torch.nn.Flatten(0, 1), torch.nn.Identity()], "layers": [8, 2]}, "stage 1 has no parameter"),
        ({"listed": [], "stages": 1}, "no module"),
        ({"listed": [*modules()[:7], torch.nn.Sequential(Extra(), modules()[7])]}, "module '7.0', a Extra, has an extra state"),
    ):
        text = said(weft.UsageError, lambda options=options: made(**options))
        assert says in text and text.count("\n") == 0, (options, text)
    listed = [weft.nn.Embedding(WORDS, 8), torch.nn.Linear(8, 8)]
    assert "a layer over all ranks" in said(weft.UsageError, lambda: made(listed))

    # Where one rank is another than the others, all of them hear which.
    buffered, frozen = modules(), modules()
    buffered[3].register_buffer("mask", torch.zeros(3 if rank == 2 else 4))
    frozen[5].extra = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32 if rank else torch.float64), requires_grad=False)
    for options, says in (
        ({"micro_batches": 4 if rank else 8}, "micro_batches is 8 on rank 0 and 4 on rank 1"),
        ({"schedule": "gpipe" if rank == 2 else "1f1b"}, "schedule is 1f1b on rank 0 and gpipe on rank 2"),
        ({"stages": 4 if rank == 3 else 2}, "stages is 2 on rank 0 and 4 on rank 3"),
        ({"listed": modules(dtype=torch.float32 if rank == 1 else torch.float64)}, "float64 on rank 0 and "),
        ({"listed": modules()[: 7 if rank == 1 else 8]}, "the number of modules is 8 on rank 0 and 7 on rank 1"),
        ({"listed": buffered}, "'3.mask', which is not trained, is (4,) of float32 on rank 0 and (3,) of float32 on rank 2"),
        ({"listed": frozen}, "'5.extra', which is not trained, is (2,) of float64 on rank 0 and (2,) of float32 on rank 1"),
    ):
        text = said(weft.UsageError, lambda options=options: made(**options))
        assert says in text, (options, text)

    pipe = made()
    ids, targets = batch_of(pipe.data_rank, 0)
    assert "as many inputs as targets" in said(weft.UsageError, lambda: pipe.step(ids, targets[1:]))
    assert "are a tensor" in said(weft.UsageError, lambda: pipe.step([1], targets))
    # Ranks of one pipeline, 0 and 2 of four ranks, have another batch: of as many samples.
    for what, batch in (("inputs", (ids + (rank == 2), targets)), ("targets", (ids, targets.roll(int(rank == 2), 0)))):
        text = said(weft.UsageError, lambda batch=batch: pipe.step(*batch))
        assert f"a checksum of the {what} is " in text and "on rank 2" in text, text
    for count in (lambda part: 2.5, lambda part: torch.tensor(0.5), lambda part: -1):
        text = said(weft.UsageError, lambda count=count: made(count=count).step(ids, targets))
        assert "is a mean over " in text and "over a whole number" in text, text
    assert "no forward of its own" in said(weft.UsageError, lambda: pipe(ids))
    for loaded in (pipe, torch.nn.Sequential(pipe)):
        kept = [id(p) for p in pipe.parameters()]
        assert "assign=True" in said(weft.UsageError, lambda loaded=loaded: loaded.load_state_dict(loaded.state_dict(), assign=True))
        loaded.load_state_dict(loaded.state_dict())
        assert [id(p) for p in pipe.parameters()] == kept
    versions = []  # of modules, which know by them what to make of a state
    hook = next(pipe.children())._register_load_state_dict_pre_hook(lambda state, prefix, known, *_: versions.append(known.get("version")))
    pipe.load_state_dict(pipe.state_dict())
    hook.remove()
    assert versions == [1]
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for given in (optimizer, {"model": pipe, "optimizer": optimizer}, {"model": torch.nn.Sequential(pipe)}):
        assert "one file a rank" in said(weft.UsageError, lambda given=given: weft.save(given, "/nowhere/state.pt"))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda pipe: copy.deepcopy(torch.nn.Sequential(pipe))):
        assert "is not copied" in said(weft.UsageError, lambda copied=copied: copied(pipe))
    copy.deepcopy(torch.nn.ModuleDict(pipe.named_children())).load_state_dict(pipe.state_dict())
    passes = torch.zeros(1, 2, dtype=torch.float64)
    assert "rounded to float32" in said(weft.UsageError, lambda: Passed.of(passes, torch.float32))
    assert Passed.of(passes, torch.float64).dtype == torch.float64
    pipe.step(ids, targets)  # nothing was sent: the job goes on
    assert "no parameter that is trained" in said(weft.UsageError, lambda: weft.DataParallel(pipe))


def replaced():
    """Parameters that are others than those that the pipeline was made of: it says so before anything is sent, and goes on with its own."""
    pipe = made(count=counted, tied=TIED)
    ids, targets = batch_of(pipe.data_rank, 0)
    path, module = next((f"{n}.mix", m.mix) for n, m in pipe.named_children() if isinstance(m, Block))
    mine = module.weight
    around = torch.nn.ModuleList([module])  # the pipeline does not see it
    for replace in (
        lambda: around.load_state_dict({name: value.clone() for name, value in around.state_dict().items()}, assign=True),
        lambda: setattr(module, "weight", torch.nn.Parameter(mine.detach().clone())),
        lambda: torch.nn.utils.parametrizations.weight_norm(module),
    ):
        bias = module.bias
        assert pipe.step(ids, targets).isfinite(), "nothing is replaced"
        replace()
        text = said(weft.UsageError, lambda: pipe.step(ids, targets))
        assert f"parameter '{path}.weight' was replaced" in text and "\n" not in text, text
        assert "was replaced" in said(weft.UsageError, lambda: pipe.evaluate(ids, targets))
        if torch.nn.utils.parametrize.is_parametrized(module):
            torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
        module.weight, module.bias = mine, bias
    pipe.to(torch.float64).requires_grad_(True)  # these stay what they were
    around.load_state_dict(around.state_dict())
    assert pipe.step(ids, targets).isfinite()
    name, child = next(iter(pipe.named_children()))
    pipe.add_module(name, torch.nn.Sequential(child))
    assert f"module {name} was replaced" in said(weft.UsageError, lambda: pipe.step(ids, targets))
    pipe.add_module(name, child)
    computed = torch.ones(len(ids), 1, requires_grad=True).sum(1, keepdim=True)
    for batch, what in (((ids * computed, targets), "inputs"), ((ids, targets * computed), "targets")):
        assert f"{what} of a pipeline are computed from" in said(weft.UsageError, lambda batch=batch: pipe.step(*batch))
    assert pipe.step(ids, targets).isfinite()


def frozen():
    """What is frozen behind the first step has no gradient, and what it was made without is not trained by one rank for itself."""
    listed = modules()
    for block in listed[1:7]:
        block.norm.requires_grad_(False)
    pipe = made(listed, count=counted, tied=TIED)
    ids, targets = batch_of(pipe.data_rank, 0)
    pipe.step(ids, targets)
    before = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.requires_grad}
    mixes = [each.mix for each in pipe.modules() if isinstance(each, Block)]
    mixes[0].requires_grad_(False)
    pipe.step(ids, targets)
    for name, p in pipe.named_parameters():
        assert torch.equal(p.grad, before[name]) if p.requires_grad else p.grad is None, name
    mixes[0].requires_grad_(True)
    # A table that stages share would go on on the other: all ranks hear of it.
    if pipe.stage == 0:
        next(each for each in pipe.modules() if isinstance(each, torch.nn.Embedding)).requires_grad_(False)
    assert "'0.weight' is shared by stages, and was frozen" in said(weft.UsageError, lambda: pipe.step(ids, targets))
    pipe.get_parameter("0.weight" if pipe.stage == 0 else "7.weight").requires_grad_(True)
    norm = next(each for each in pipe.modules() if isinstance(each, torch.nn.LayerNorm))
    norm.bias.requires_grad_(True)
    assert "norm.bias' wants a gradient, and did not when" in said(weft.UsageError, lambda: pipe.step(ids, targets))
    norm.bias.requires_grad_(False)
    pipe.step(ids, targets)
    assert all(torch.equal(p.grad, before[name]) for name, p in pipe.named_parameters() if p.requires_grad)


def unreadable():
    yield from modules()[:7]
    raise FileNotFoundError("no weights\n\there")


def one_rank_fails():
    """Before ranks have compared anything. All hear of it at once, and the job goes on."""
    last = weft.size() - 1
    for options, kind, says in (
        ({"not_finite": "maybe"}, weft.UsageError, "not_finite is one of error, skip, nan, not 'maybe'"),
        ({"tied": [("0.weight", "9.weight")]}, weft.UsageError, "tied: there is no parameter '9.weight' in the list of modules"),
        ({"layers": 4}, TypeError, "TypeError: 'int' object is not iterable"),
        ({"listed": unreadable()}, FileNotFoundError, "FileNotFoundError: no weights here"),
    ):
        mine = weft.rank() == last
        start = time.monotonic()
        text = said(kind if mine else weft.UsageError, lambda options=options: made(**(options if mine else {})))
        assert " ".join(text.split()) in says if mine else text == f"rank {last}: {says}", text
        assert time.monotonic() - start < 20, "the deadline of an operation is later"
    text = said(weft.UsageError, lambda: made(not_finite="maybe" if weft.rank() else "never"))
    assert "'maybe'" in text if weft.rank() else "'never'" in text, "each says its own"
    # Control: they return because that rank says so, not before.
    start = time.monotonic()
    if weft.rank() == last:
        time.sleep(2)
    assert "'maybe'" in said(weft.UsageError, lambda: made(not_finite="maybe" if weft.rank() == last else "skip"))
    assert time.monotonic() - start > 1.5
    pipe = made(count=counted)
    assert pipe.step(*batch_of(pipe.data_rank, 0)).isfinite()


class Wider(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(8, 9, dtype=torch.float64)

    def forward(self, x):
        return self.more(x)


def broken_module():
    """Activations of another width behind the second stage. Ends the job."""
    wide = [torch.nn.Linear(9, 9, dtype=torch.float64), torch.nn.Linear(9, WORDS, dtype=torch.float64)]
    listed = [*modules()[:2], Block(torch.float64), Wider(), *wide]
    pipe = made(listed, stages=4, layers=[1, 3, 1, 1])
    start = time.monotonic()
    text = said(weft.Error, lambda: pipe.step(*batch_of(0, 0, samples=8)))
    assert f"module 3 gives (2, {LENGTH}, 9) of float64 to the next stage" in text and "one shape and one type" in text, text
    assert time.monotonic() - start < 30
    print("named the module", flush=True)


def flat_activations():
    """The first stage gives one number a sample. Ends the job."""
    listed = [torch.nn.Embedding(WORDS, 1), torch.nn.Flatten(0, 1), torch.nn.Flatten(0), torch.nn.Linear(1, 1)]
    text = said(weft.Error, lambda: made(listed, layers=[3, 1]).step(*batch_of(0, 0)))
    assert f"[samples, ..., width] of floats, not ({2 * LENGTH},) of float32" in text, text  # (of 7 samples in 4 micro-batches)
