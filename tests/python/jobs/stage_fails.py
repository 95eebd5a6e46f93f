"""What fails on one rank of a pipeline is raised on all of them, at once, and names that rank. Before a step it ends nothing: the job goes on to
the bit as if nothing had been called. Inside of one it ends the job, and what comes behind it is refused. Ranks join anew for each of the latter."""

import contextlib
import signal
import time

import torch
import torch.distributed as dist
from stage_models import WIDTH, WORDS, batch_of, loss_of

import weft

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
SECONDS = 10  # far below the deadline of an operation


class Noisy(torch.nn.Module):
    """Takes random numbers, and counts what it has seen."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.drop = torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(x + self.norm(self.mix(x).transpose(1, 2)).transpose(1, 2))


class Failure(Exception):
    pass


class FailsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise failing["backward"]


failing = {}  # on this rank, what is raised where


class Fails(torch.nn.Module):
    def forward(self, x):
        if "forward" in failing:
            raise failing["forward"]
        return FailsBack.apply(x) if "backward" in failing else x


def loss(given, targets):
    if "loss" in failing:
        raise failing["loss"]
    return loss_of(given, targets).detach() if "detached" in failing else loss_of(given, targets)


def counted(targets):
    if "count" in failing:
        raise failing["count"]
    return failing.get("counts", 1) * int((targets != -100).sum())


def made(**options):
    torch.manual_seed(0)
    listed = [torch.nn.Embedding(WORDS, WIDTH), torch.nn.Sequential(Noisy(), Fails()), torch.nn.Sequential(Noisy(), Fails())]
    listed.append(torch.nn.Linear(WIDTH, WORDS))
    return weft.pipeline.Pipeline(listed, 2, loss, 4, count=counted, **options)


@contextlib.contextmanager
def told(bad, kind, own, others):
    """Raised inside: on the rank `bad` a `kind` that says `own`, on the others an error of weft that says `others`; where `bad` is None, on all."""
    start = time.monotonic()
    kind, says = (kind, own) if rank == bad else (weft.Error, others)
    try:
        yield
    except kind as error:
        assert says in str(error), (says, repr(error))
    else:
        raise AssertionError(f"nothing was said of '{says}'")
    assert time.monotonic() - start < SECONDS


def refusals(pipe, bad):
    """What is wrong on the rank `bad` alone: what it says there, and on the others. Samples: 7 of the first pipeline, 8 of the second."""
    mine, data_size = rank == bad, pipe.data_size
    ids, targets = batch_of(pipe.data_rank, 9)
    linear = next(each for each in pipe.modules() if isinstance(each, torch.nn.Linear))
    stages = (bad % data_size, bad % data_size + data_size)  # of that rank's pipeline

    def differs(what, there, here):
        values = [there if r == bad else here for r in stages]
        return told(None, weft.UsageError, "", f"{what} is {values[0]} on rank {stages[0]} and {values[1]} on rank {stages[1]}: all ranks call the same")

    for call in (pipe.step, pipe.evaluate):
        weight = linear.weight
        if mine:
            linear.weight = torch.nn.Parameter(weight.detach().clone())
        with told(bad, weft.UsageError, "weight' was replaced", f"rank {bad}: parameter '"):
            call(ids, targets)
        linear.weight = weight
        if mine:
            failing["count"] = Failure("no\nnumber")
        with told(bad, Failure, "no\nnumber", f"rank {bad}: Failure: no number"):
            call(ids, targets)
        failing.clear()
        with told(bad, weft.UsageError, "as many inputs as targets, not 7 and 6", f"rank {bad}: a batch has as many"):
            call(ids[:7], targets[: 6 if mine else 7])
        with told(bad, weft.UsageError, "targets of a pipeline are a tensor", f"rank {bad}: targets of a pipeline are a tensor"):
            call(ids, [1] if mine else targets)
        samples = 7 + bad % data_size
        fewer = len(ids) - mine
        with differs("the number of samples", samples - 1, samples):
            call(ids[:fewer], targets[:fewer])
        with differs("a sample of inputs", "(4,) of int64", "(5,) of int64"):
            call(ids[:, : 5 - mine], targets)
        with differs("a sample of inputs", "(5,) of int32", "(5,) of int64"):
            call(ids.to(torch.int32 if mine else torch.int64), targets)
        with differs("autocast", "bfloat16 on cpu", "off"), torch.autocast("cpu", torch.bfloat16, enabled=mine):
            call(ids, targets)
    for apart in (rank == bad, pipe.data_rank == bad % data_size):  # one rank, and a whole pipeline
        with told(None, weft.UsageError, "", "what is called is "):
            (pipe.evaluate if apart else pipe.step)(ids, targets)
    failing.update({"counts": -1} if mine else {})
    with told(bad, weft.UsageError, "a mean over -", f"rank {bad}: the loss of a micro-batch is a mean over -"):
        pipe.step(ids, targets)
    failing.clear()
    with told(bad, weft.UsageError, "inference_mode", f"rank {bad}: inside of torch.inference_mode()"), torch.inference_mode(mine):
        pipe.step(ids, targets)


def trained(disturbed):
    """Losses, state and random numbers behind three steps, between which `disturbed` ranks call something wrong."""
    pipe = made()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    torch.manual_seed(rank)
    losses = []
    for step in range(3):
        for bad in disturbed if step < 2 else ():  # (before the first one, too, when nothing is known of what passes)
            gradients = [p.grad for p in pipe.parameters()]
            refusals(pipe, bad)
            assert all(p.grad is before for p, before in zip(pipe.parameters(), gradients))
        losses.append(pipe.step(*batch_of(pipe.data_rank, step)).item())
        optimizer.step()
    return losses, {**pipe.state_dict(), "random numbers": torch.get_rng_state()}


def refused_before_a_step():
    weft.init()
    calm, disturbed = trained(()), trained((0, size - 1))
    assert calm[0] == disturbed[0] and all(torch.equal(calm[1][name], disturbed[1][name]) for name in calm[1])
    torch.manual_seed(rank + 1)
    assert not torch.equal(torch.get_rng_state(), calm[1]["random numbers"]), "control: they are those of the seed and of what took some"

    # Control: the others return because that rank says so, not before.
    pipe = made()
    ids, targets = batch_of(pipe.data_rank, 0)
    start = time.monotonic()
    if rank == 0:
        time.sleep(1)
    with told(0, weft.UsageError, "as many", "rank 0: a batch"):
        pipe.step(ids, targets[:1] if rank == 0 else targets)
    assert time.monotonic() - start > 0.9
    weft.shutdown()


def ended_inside_of_a_step():
    last = size - 1
    for where, what, bad, says in (
        ("forward", Failure("cannot"), last, "Failure: cannot"),
        ("forward", Failure("cannot"), 0, "Failure: cannot"),  # (of the first micro-batch of the first stage)
        ("backward", Failure("cannot"), 1, "Failure: cannot"),
        ("backward", KeyboardInterrupt(), last, "KeyboardInterrupt"),
        ("loss", ZeroDivisionError("by zero"), last, "ZeroDivisionError: by zero"),
        ("detached", weft.UsageError("a micro-batch has no gradient"), last, "UsageError: the loss of a micro-batch has no gradient"),
    ):
        dist.barrier()
        weft.init()
        pipe = made(schedule="zb-h1" if bad == last else "1f1b")
        if where != "forward" or bad != 0:
            assert pipe.step(*batch_of(pipe.data_rank, 0)).isfinite()
        failing.update({where: what} if rank == bad else {})
        with told(bad, type(what), str(what), f"rank {bad}: a step of the pipeline ended with {says}"):
            pipe.step(*batch_of(pipe.data_rank, 1))
        failing.clear()
        for call in (pipe.step, pipe.evaluate):
            with told(None, weft.UsageError, "", "the last step was interrupted: this job cannot go on"):
                call(*batch_of(pipe.data_rank, 2))
        weft.shutdown()


def interrupted_while_it_waits():
    """Ctrl-C on a rank whose peers are late: they hear of it when they come."""
    dist.barrier()
    weft.init()
    pipe = made()
    weft.barrier()
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(1)
    with told(0, KeyboardInterrupt, "", "rank 0: a step of the pipeline ended with KeyboardInterrupt"):
        pipe.step(*batch_of(pipe.data_rank, 0))
    with told(None, weft.UsageError, "", "cannot go on"):
        pipe.step(*batch_of(pipe.data_rank, 0))
    weft.shutdown()


refused_before_a_step()
ended_inside_of_a_step()
interrupted_while_it_waits()
dist.barrier()
dist.destroy_process_group()
