"""weft.pipeline over two stages whose modules are on a device: losses and parameters equal one process there, in float64; an overflow of float16
beside a GradScaler; factors between stages. The argument is the device of modules and batches.

float64: 1e-12 relative, because only the order of additions differs.
"""

import functools
import sys

import torch
from stage_models import TIED, batch_of, counted, loss_of, loss_of_all, modules, steps_of_one_process, whole

import weft

torch.set_num_threads(1)
DEVICE = torch.device(sys.argv[1])
STEPS = 4
weft.init()
rank, size = weft.rank(), weft.size()
pipelines = size // 2


def batch(pipeline, step):
    return tuple(each.to(DEVICE) for each in batch_of(pipeline, step, samples=16))


def made(dtype=torch.float64, **options):
    given = {"modules": [module.to(DEVICE) for module in modules(seed=rank, dtype=dtype)], "loss": loss_of, **options}
    return weft.pipeline.Pipeline(stages=2, micro_batches=4, count=counted, tied=TIED, **given)


def distance(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))


def trained(pipe, steps=STEPS):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        losses.append(pipe.step(*batch(pipe.data_rank, step % STEPS)).item())
        assert all(p.device.type == p.grad.device.type == DEVICE.type for p in pipe.parameters())
        optimizer.step()
    return losses


def equality():
    model = whole().to(DEVICE)
    batches = [[batch(d, step) for d in range(pipelines)] for step in range(STEPS)]
    losses, gradients = steps_of_one_process(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    state = model.state_dict()
    for schedule in ("1f1b", "zb-h1"):
        pipe = made(schedule=schedule)
        assert all(abs(a - b) < 1e-12 * abs(b) for a, b in zip(trained(pipe), losses)), schedule
        for name, p in pipe.named_parameters():
            assert distance(p.grad, gradients.get(name, gradients["0.weight"])) < 1e-12, (schedule, name)
        values = pipe.state_dict()
        assert values and all(distance(value, state[name]) < 1e-12 for name, value in values.items()), schedule
        behind = pipe.evaluate(*batch(pipe.data_rank, 9)).item()
        expected = loss_of_all(model, [batch(d, 9) for d in range(pipelines)]).item()
        assert abs(behind - expected) < 1e-12 * expected, (schedule, behind, expected)
        trained(pipe, steps=1)
        assert any(distance(value, state[name]) > 1e-3 for name, value in pipe.state_dict().items()), "control: a step more"


def half():
    """float16 by autocast: the loss is scaled, an overflow on one rank is left out on all and halves the scale, and the others train as in
    float32."""
    overflows, scaler = 2, torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=100)
    expected = trained(made(torch.float32), steps=1)[0]

    def broken(given, targets):
        overflow = step == overflows and rank == size - 1 and torch.is_grad_enabled()
        return loss_of(given, targets) * (float("inf") if overflow else 1.0)

    pipe = made(torch.float32, loss=broken, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses, scales = [], []
    for step in range(STEPS):
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        with torch.autocast(DEVICE.type, torch.float16):
            losses.append(pipe.step(*batch(pipe.data_rank, step)).item())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        kept = all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
        assert kept == (step == overflows), step
    assert scales == [1024, 1024, 512, 512] and pipe.skipped_steps == 1, (scales, pipe.skipped_text)
    # Half of float16's last digit, 2^-11, at each of some twenty roundings; control: there are some.
    assert 0 < abs(losses[0] - expected) < 20 * 2**-11 * expected, (losses, expected)
    assert all(torch.isfinite(torch.tensor(losses[i])) for i in range(STEPS) if i != overflows), losses


def factors():
    make = functools.partial(made, torch.float32)
    plain, epilogue, every = make(), make(backward_rank=1), make(backward_rank=1, backward_messages="all")
    sent = []
    for pipe in (plain, epilogue, every):
        trained(pipe, steps=1)
        sent.append(pipe.compression.sent_bytes["stages"])
        losses = trained(pipe, steps=24)
        assert torch.tensor(losses).isfinite().all() and sum(losses[-4:]) < 0.95 * sum(losses[:4]), losses
    if plain.stage == 0:
        assert sent[0] == sent[1] == sent[2] > 0, "control: activations travel as they are"
    else:
        assert sent[0] > sent[1] > sent[2] > 0, sent
    try:
        trained(made(backward_rank=1), steps=1)
    except weft.UsageError as error:
        assert "float" in str(error), error
    else:
        raise AssertionError("factors are of float32")


equality()
half()
factors()
