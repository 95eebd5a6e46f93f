"""What a pipeline keeps: a state of the whole list by name, which any other number of stages loads; residuals and errors of messages, with
which a job goes on as if it had not stopped. What stages.py calls."""

import pickle

import torch
from stage_models import TIED, batch_of, counted, loss_of, modules

import weft


def made(stages, micro_batches=4, dtype=torch.float32, **options):
    return weft.pipeline.Pipeline(modules(dtype=dtype), stages, loss_of, micro_batches, count=counted, tied=TIED, **options)


def trained(pipe, optimizer, steps):
    return [train(pipe, optimizer, step) for step in steps]


def train(pipe, optimizer, step, samples=16):
    loss = pipe.step(*batch_of(pipe.data_rank, step % 4, samples))
    optimizer.step()
    return loss.item()


def whole_text(pipe):
    return {name: value.clone() for name, value in weft.pipeline.gather_state_dict(pipe).items()}


def same_rows(a, b):
    return pickle.dumps([plain_row(row) for row in a["rows"]]) == pickle.dumps([plain_row(row) for row in b["rows"]])


def plain_row(row):
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in row.items()}


def compressed():
    """Factors between stages and sparse sums: they train, send less, and a job that stops and goes on has the bits of one that does not."""
    sizes = {}
    for options in (
        {},
        {"backward_rank": 1},
        {"backward_rank": 1, "backward_messages": "all"},
        {"backward_rank": 1, "backward_messages": "all", "lazy_error": False},
        {"backward_rank": 1, "scheme": "spardl", "density": 0.1, "dense_below": 0},
        {"backward_rank": 1, "scheme": "powersgd", "powersgd_rank": 1, "dense_below": 0},
        {"backward_rank": 1, "schedule": "zb-h1"},
        {"backward_bits": 4},
        {"backward_bits": 8, "backward_messages": "all"},
    ):
        pipe = made(2, **options)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3)
        losses = trained(pipe, optimizer, range(24))
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), (options, losses)
        sizes[str(options)] = pipe.compression.sent_bytes
        if not options:
            continue
        again = made(2, **options)
        assert again.compression.step == 0
        kept = pipe.compression.state_dict()
        again.compression.load_state_dict(kept)  # before its first step
        assert same_rows(again.compression.state_dict(), kept) and kept["rows"], options
        again.load_state_dict(pipe.state_dict())
        pipe.evaluate(*batch_of(pipe.data_rank, 3))  # nothing of it is kept
        states = []
        for each in (pipe, again):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.3)
            short = train(each, optimizer, 24, samples=8)  # of an epoch's end, say: what longer ones left behind stays
            states.append(([short, *trained(each, optimizer, range(25, 27))], whole_text(each)))
        assert states[0][0] == states[1][0], options
        assert all(torch.equal(states[0][1][name], states[1][1][name]) for name in states[0][1]), options
        fresh = made(2, **options)
        fresh.load_state_dict(again.state_dict())
        other = made(2, **options)
        other.load_state_dict(again.state_dict())
        other.compression.load_state_dict(again.compression.state_dict())
        differ = [trained(each, torch.optim.SGD(each.parameters(), lr=0.3), range(2)) for each in (fresh, other)]
        keeps = options.get("lazy_error", True) or "scheme" in options
        assert (differ[0] != differ[1]) or not keeps, "control: without what was left behind it is another run"
    if weft.rank() >= weft.size() // 2:  # the last stage sends gradients back
        every = [each["stages"] for each in sizes.values()]
        assert every[2] < every[1] < every[0] and every[3] == every[2], every
        assert every[8] < every[7] < every[0], every  # eight bits of all messages, four of the last ones
    if weft.size() == 4:
        sums = [each["gradients"] for each in sizes.values()]
        assert sums[4] < sums[0] and sums[5] < sums[0], sums


def of_all_ranks(state):
    """The states of all ranks, on each of them."""
    raw = pickle.dumps(state)
    lengths = torch.zeros(weft.size(), dtype=torch.int64)
    weft.all_gather(lengths, torch.tensor([len(raw)]))
    most = int(lengths.max())
    everything = torch.zeros(weft.size() * most, dtype=torch.uint8)
    weft.all_gather(everything, torch.frombuffer(bytearray(raw.ljust(most)), dtype=torch.uint8))
    return [pickle.loads(part[:n].numpy().tobytes()) for part, n in zip(everything.view(weft.size(), most), lengths.tolist())]


def residuals(states):
    """Of each parameter, summed over the ranks."""
    out = {}
    for row in (row for state in states for row in state["rows"] if row["kind"] == "residual" and row["values"] is not None):
        out[row["name"]] = out.get(row["name"], 0) + row["values"].double()
    return out


def relaid():
    """Residuals go with their parameters to ranks that have other modules."""
    options = {"scheme": "spardl", "density": 0.1, "dense_below": 0}
    pipe, other = made(2, **options), made(2, layers=[3, 5], **options)
    for each in (pipe, other):
        trained(each, torch.optim.SGD(each.parameters(), lr=0.3), range(3))
    states = of_all_ranks(pipe.compression.state_dict())
    other.compression.load_state_dict(states)
    waits = made(2, **options)
    waits.compression.load_state_dict(states)
    try:
        waits.compression.state_dict()
    except weft.UsageError as error:
        assert "states of other ranks" in str(error), error
    else:
        raise AssertionError("nothing was said")
    before, after = residuals(states), residuals(of_all_ranks(other.compression.state_dict()))
    assert before.keys() == after.keys() and "4.mix.weight" in before and "0.weight" not in before  # (what is tied is summed dense)
    assert all(float((before[name] - after[name]).abs().max()) < 1e-6 for name in before)


def resumed(path):
    """weft.save of a pipeline and its compression is all that a job goes on from: on all ranks, with the bits of one that did not stop."""
    for options in (
        {"backward_rank": 1, "backward_messages": "all"},
        {"backward_rank": 1, "schedule": "interleaved", "chunks": 2, "scheme": "oktopk", "density": 0.1, "dense_below": 0},
        {"backward_rank": 1, "scheme": "powersgd", "powersgd_rank": 1, "dense_below": 0},
        {"backward_rank": 1, "scheme": "spardl", "density": 0.1, "dense_below": 0},
    ):
        pipe = made(2, **options)
        trained(pipe, torch.optim.SGD(pipe.parameters(), lr=0.3), range(5))
        weft.save({"model": pipe, "compression": pipe.compression}, path)
        expected = trained(pipe, torch.optim.SGD(pipe.parameters(), lr=0.3), range(5, 8)), whole_text(pipe)
        weft.barrier()  # rank 0 has written it
        saved = torch.load(path, weights_only=True)
        assert [state["rank"] for state in saved["compression"]] == list(range(weft.size()))
        assert all("figures" in [row["kind"] for row in state["rows"]] for state in saved["compression"]), "which algorithms are chosen by"
        # Control: what rank 0 alone had, as if the others had left nothing behind.
        of_rank_0 = [
            {**state, "rows": [row if state["rank"] == 0 or not is_left_behind(row) else emptied(row) for row in state["rows"]]}
            for state in saved["compression"]
        ]
        for states, same in ((saved["compression"], True), (list(reversed(saved["compression"])), True), (of_rank_0, False)):
            again = made(2, **options)
            again.load_state_dict(saved["model"])
            again.compression.load_state_dict(states)
            found = trained(again, torch.optim.SGD(again.parameters(), lr=0.3), range(5, 8)), whole_text(again)
            bits = found[0] == expected[0] and all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
            assert bits == same, (options, same)
    goes_on_elsewhere(saved, stages=4)


def is_left_behind(row):
    return row["kind"] in ("error", "residual")


def emptied(row):
    return {**row, "values": None if row["rule"] == "sum" else torch.zeros_like(row["values"])}


def goes_on_elsewhere(saved, stages):
    """With twice the stages, and so half the data-parallel ranks, residuals are kept, what messages had left behind is dropped, and one rank says so: stages_test.py counts the lines."""
    options = {"backward_rank": 1, "scheme": "spardl", "density": 0.1, "dense_below": 0}
    pipe, fresh = made(stages, **options), made(stages, **options)
    pipe.compression.load_state_dict(saved["compression"])
    for each in (pipe, fresh):
        each.load_state_dict(saved["model"])
    pipe.evaluate(*batch_of(pipe.data_rank, 0))  # installs it
    states = of_all_ranks(pipe.compression.state_dict())
    before, after = residuals(saved["compression"]), residuals(states)
    assert before.keys() == after.keys() and all(float((before[name] / 2 - after[name]).abs().max()) < 1e-6 for name in before), "half the ranks"
    assert any(float((before[name] - after[name]).abs().max()) > 1e-6 for name in before), "control: sums as they were"
    errors = [row["values"] for state in states for row in state["rows"] if row["kind"] == "error"]
    assert len(errors) == weft.size() - weft.size() // stages and all(each is None or not bool(each.any()) for each in errors), errors
    assert trained(pipe, torch.optim.SGD(pipe.parameters(), lr=0.3), range(2)) != trained(
        fresh, torch.optim.SGD(fresh.parameters(), lr=0.3), range(2)
    ), "control: residuals make a difference"


def save(path):
    pipe = made(4, dtype=torch.float64)
    trained(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), range(2))
    weft.save(pipe, path)
    mine = pipe.state_dict()
    assert {name.split(".")[0] for name in mine} == {str(2 * pipe.stage), str(2 * pipe.stage + 1)}
    everything = weft.pipeline.gather_state_dict(pipe, on_all_ranks=False)
    assert (len(everything) > len(mine)) == (weft.rank() == 0) and bool(everything) == (weft.rank() == 0)
    # At another number of stages, and in a plain list.
    everything = whole_text(pipe)
    other = made(2, dtype=torch.float64)
    other.load_state_dict(everything)
    again = whole_text(other)
    assert list(again) == list(everything) and all(torch.equal(again[name], everything[name]) for name in again)
    batch = batch_of(0, 7)
    assert abs(pipe.evaluate(*batch) - other.evaluate(*batch)) < 1e-12
    torch.nn.ModuleList(modules()).load_state_dict(everything)
    here = next(iter(other.state_dict()))
    for broken, says in (
        ({k: v for k, v in everything.items() if k != here}, here),
        ({**everything, "8.weight": everything["7.weight"]}, "8.weight"),
    ):
        try:
            other.load_state_dict(broken)
        except RuntimeError as error:
            assert says in str(error), error
        else:
            raise AssertionError(says)


def load(path):
    goes_on_elsewhere(torch.load(f"{path}.whole", weights_only=True), stages=2)
    saved = torch.load(path, weights_only=True)
    pipe = made(2, dtype=torch.float64)
    before = pipe.evaluate(*batch_of(0, 7)).item()
    pipe.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in pipe.state_dict().items())
    assert abs(pipe.evaluate(*batch_of(0, 7)).item() - before) > 1e-3, "control: it was another model"
