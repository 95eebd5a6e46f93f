"""A process group of torch.distributed as the place of a rank: where a program has one, no launcher's variables are needed.

Rank 0 of the group says over the group's store where weft's ranks meet, and with which token: whoever reaches the store belongs to
the job, on several hosts too. WEFT_ADDR, WEFT_PORT and WEFT_TOKEN go before, where they are set. Nothing here imports torch.
"""

import json
import os
import secrets
import socket
import sys
import time
from typing import Any, Dict, Iterable, List, Optional, Tuple

from ._weft import TimeoutError, UsageError

Place = Tuple[int, int, str, int, str]  # rank, size, rank 0's address and port, token
_POLL_SECONDS = 0.01
_joined: Dict[str, int] = {}  # by the group's name: how often this process has joined with it


def initialized_group() -> Optional[Any]:
    """Of all processes, where torch.distributed is initialised."""
    dist = sys.modules.get("torch.distributed")
    return dist.group.WORLD if dist is not None and dist.is_available() and dist.is_initialized() else None


def rank_and_size(group: Any) -> Tuple[int, int]:
    """This process's, in the group; raises UsageError where it has none."""
    dist = sys.modules["torch.distributed"]
    rank = dist.get_rank(group) if isinstance(group, dist.ProcessGroup) else -1
    if rank < 0:
        raise UsageError("process_group: this process is no member of it, so it cannot join it")
    return rank, dist.get_world_size(group)


def place_in(group: Any) -> Place:
    """All ranks of the group call it; returns when rank 0 has said where they meet."""
    rank, size = rank_and_size(group)
    store = sys.modules["torch.distributed"].distributed_c10d._get_process_group_store(group)
    count = _joined[group.group_name] = _joined.get(group.group_name, 0) + 1
    prefix = f"weft/{count}/"
    store.set(f"{prefix}{rank}", json.dumps([_network(), socket.gethostname()]))
    if rank == 0:
        told = [json.loads(_read(store, f"{prefix}{r}", r)) for r in range(size)]
        here = told[0][0]
        address = os.environ.get("WEFT_ADDR") or _own_address(store, [host for network, host in told if network != here])
        port = int(os.environ.get("WEFT_PORT") or 0) or _free_port(address)
        token = "" if os.environ.get("WEFT_TOKEN") else secrets.token_hex(32)
        store.set(f"{prefix}meet", json.dumps([address, port, token]))
    address, port, token = json.loads(_read(store, f"{prefix}meet", 0))
    return rank, size, address, port, token


def _read(store: Any, key: str, rank: int) -> str:
    """What that rank says, in slices between which Ctrl-C is seen; the deadline is the store's own."""
    seconds = store.timeout.total_seconds()
    end = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > end:
            error = TimeoutError(f"rank {rank} of the process group did not come to weft.init() in {seconds:.0f} s")
            error.peer, error.seconds = rank, seconds
            raise error
        time.sleep(_POLL_SECONDS)
    text: str = store.get(key).decode()
    return text


def _network() -> str:
    """The same for processes that reach each other over loopback: host names alone may repeat, and containers share a boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


def _own_address(store: Any, other_hosts: List[str]) -> str:
    """By which processes on these hosts reach this one."""
    if not other_hosts:
        return "127.0.0.1"
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    # All ranks reached the store, so its host is in the right network; it is often this one.
    known = [os.environ.get("MASTER_ADDR"), getattr(store, "host", None), *other_hosts]
    for address in _addresses_towards(host for host in known if host):
        if not address.startswith("127.") and address not in ("::1", "0.0.0.0"):
            return address
    raise UsageError(f"no address is known by which {other_hosts[0]} reaches rank 0: set WEFT_ADDR")


def _addresses_towards(hosts: Iterable[str]) -> Iterable[str]:
    for host in hosts:
        try:
            family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # sends nothing: it asks the routes for this side's address
                yield str(probe.getsockname()[0])
        except OSError:
            continue


def _free_port(address: str) -> int:
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
