"""Ranks on hosts of their own (tools/netlab), with a process group and no token: the group's store has all that is needed."""

import os

import torch
import torch.distributed as dist

import weft

dist.init_process_group("gloo")
me, size = dist.get_rank(), dist.get_world_size()
told = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "WEFT_TOKEN")}


def joins(group, members):
    weft.init(process_group=group)
    assert (weft.rank(), weft.size(), weft.transport()) == (members.index(me), len(members), "tcp")
    x = torch.tensor([float(me)])
    weft.all_reduce(x)
    assert x.item() == sum(members)
    weft.shutdown()


everybody, behind = list(range(size)), list(range(1, size))
joins(None, everybody)
group = dist.new_group(behind)  # whose first rank is not where the store is
if me in behind:
    joins(group, behind)
dist.barrier()
place = os.environ.pop("MASTER_ADDR")
joins(None, everybody)  # by the store's own address

# Control: the launcher's variables alone need a token between hosts.
dist.barrier()
dist.destroy_process_group()
os.environ.update(told, MASTER_ADDR=place)
del os.environ["WEFT_TOKEN"]
try:
    weft.init()
except weft.Error as error:
    assert "WEFT_TOKEN" in str(error), error
else:
    raise AssertionError("ranks met between hosts without a secret")
