"""What a layer of experts refuses, and what it says where ranks disagree or a gate breaks: sentences, and nothing hangs. What moe.py calls
on 4 ranks."""

import time

import torch

import weft


def said(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was said")


def refusals():
    rank = weft.rank()
    for options, says in (
        ({"experts": 6, "ep": 4}, "6 experts cannot be dealt to 4 ranks"),
        ({"experts": 2, "ep": 4}, "2 experts cannot be dealt to 4 ranks"),
        ({"experts": 6, "ep": 3}, "4 ranks do not make groups of 3"),
        ({"experts": 0}, "at least one expert"),
        ({"capacity_factor": -1.0}, "capacity factor"),
        ({"capacity_factor": float("nan")}, "capacity factor"),
        ({"choices": 9}, "1 to 8 choices"),
        ({"choices": 0}, "1 to 8 choices"),
        ({"slices": 0}, "at least one slice"),
        ({"jitter": 1.5}, "jitter"),
    ):
        text = said(weft.UsageError, lambda options=options: weft.nn.MoE(4, 4, **{"name": "m", **options}))
        assert says in text and text.startswith("layer 'm'"), text
    assert "hidden" in said(weft.UsageError, lambda: weft.nn.MoE(4))
    unlike = lambda number: torch.nn.Linear(4, 4, bias=number != 1)  # noqa: E731
    assert "expert 1 has other tensors than expert 0" in said(weft.UsageError, lambda: weft.nn.MoE(4, expert=unlike, name="u"))
    assert weft.nn.MoE(4, 4, experts=6).ep == 2 and weft.nn.MoE(4, 4, experts=3).ep == 1, "as many as can be"

    text = said(weft.UsageError, lambda: weft.nn.MoE(4, 4, experts=8 if rank < 2 else 6, name="m", ep=4))
    assert text.startswith("layer 'm': experts is ") and "on rank" in text, text
    text = said(weft.UsageError, lambda: weft.nn.MoE(4, 4, capacity_factor=1.0 + rank, name="m"))
    assert "another capacity factor" in text, text

    layer = weft.nn.MoE(4, 4, name="m")
    assert "width 4" in said(weft.UsageError, lambda: layer(torch.zeros(2, 5)))
    assert "when it was called" in said(weft.UsageError, lambda: layer.loss)
    assert layer(torch.zeros(2, 4)).shape == (2, 4), "nothing was sent: the job goes on"
    wrong = weft.nn.MoE(4, experts=4, expert=lambda _: torch.nn.Linear(4, 3), name="w")
    assert "an expert of layer 'w' made (" in said(weft.UsageError, lambda: wrong(torch.ones(4, 4)))


def broken_gate():
    """Ends the job."""
    layer = weft.nn.MoE(4, 4, name="m")
    x = torch.ones(3, 4)
    if weft.rank() == 2:
        x[1, 1] = float("nan")
    start = time.monotonic()
    # (Whoever is behind may hear of it in the barrier.)
    text = said(weft.Error, lambda: (weft.barrier(), layer(x)))
    assert "rank 2: the gate of layer 'm' gives numbers that are not finite" in text, text
    assert time.monotonic() - start < 30
    print("named the gate", flush=True)
