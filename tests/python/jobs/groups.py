"""torch.distributed is initialised: rank, size, place and token come from its group, and nothing from a launcher's variables."""

import os

import torch
import torch.distributed as dist
from models import batch, mlp

import weft
from weft import _group

dist.init_process_group("gloo")
me, all_ranks = dist.get_rank(), dist.get_world_size()
told = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "MASTER_PORT")}  # WORLD_SIZE stays, as Lightning leaves it
assert "WORLD_SIZE" in os.environ and "WEFT_TOKEN" not in os.environ


def joined_as(rank, size):
    assert (weft.rank(), weft.size(), weft.transport()) == (rank, size, "tcp")
    x = torch.tensor([float(dist.get_rank())])
    weft.all_reduce(x)
    weft.barrier()
    return x.item()


def refused(call, word):
    try:
        call()
    except weft.UsageError as error:
        assert word in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"nobody said '{word}'")


# The default group, more than once.
for _ in range(2):
    weft.init()
    assert joined_as(me, all_ranks) == sum(range(all_ranks))
    weft.init(process_group=dist.group.WORLD)  # does nothing
    weft.shutdown()

# A group of its own: ranks are those in it. A process outside cannot join it.
some = dist.new_group([1, 2])
if me == 0:
    refused(lambda: weft.init(process_group=some), "no member")
else:
    weft.init(process_group=some)
    assert joined_as(me - 1, 2) == 3
    refused(lambda: weft.init(process_group=dist.group.WORLD), f"rank {me} of 3")

# The hook's state joins the group of its module, or says that weft has joined another.
whole = torch.nn.parallel.DistributedDataParallel(mlp(5))
if me != 0:
    refused(lambda: weft.DDPState(whole), f"rank {me} of 3")
    weft.shutdown()
    part = torch.nn.parallel.DistributedDataParallel(mlp(5), process_group=some)
    part.register_comm_hook(weft.DDPState(part, scheme="dense"), weft.ddp_hook)
    part(batch(0, me, dtype=torch.float32)[0]).sum().backward()
    mine = part.module[0].weight.grad.clone()
    reference = mlp(5)
    for r in (1, 2):
        (reference(batch(0, r, dtype=torch.float32)[0]).sum() / 2).backward()
    assert joined_as(me - 1, 2) == 3 and torch.allclose(mine, reference[0].weight.grad, rtol=1e-5)
    weft.shutdown()

# Off loopback a token is needed: it comes over the store. Control: without the group it is asked for.
dist.barrier()
away = next(iter(_group._addresses_towards(["192.0.2.1"])), "127.0.0.1")  # of this host, by its routes
if not away.startswith("127."):
    os.environ["WEFT_ADDR"] = away
    weft.init()
    assert joined_as(me, all_ranks) == sum(range(all_ranks))
    weft.shutdown()
    dist.destroy_process_group()
    os.environ.update(told)
    refused(weft.init, "WEFT_TOKEN")
else:
    print("no address but loopback: the token over the store is not tried off it")
