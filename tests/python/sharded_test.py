"""Sharded tables: the layer, the optimizers of rows, lookahead, clipping, state."""

import copy
import sys
import warnings

import pytest
import torch
from conftest import JOBS

import weft

sys.path.insert(0, JOBS)
from two_tables import IDS, Model, batch_of  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_equals_one_process(launch, size):
    launch("tables.py", size)


def test_beside_ddp_with_a_scaler_and_clipping(launch):
    launch("tables_ddp.py", 2, launcher="torchrun")


def test_ddp_around_modules_that_were_not_given(launch):
    launch("tables_wrapped.py", 2, launcher="torchrun")


def test_a_job_of_another_size_goes_on_from_a_checkpoint(launch, tmp_path):
    path = tmp_path / "state.pt"
    launch("tables_state.py", 4, path, "save")
    for size in (1, 2):
        launch("tables_state.py", size, path, "load")


@pytest.mark.parametrize("others", ["sleep", "train"])
def test_a_state_dict_on_one_rank_names_the_fix(launch, others):
    assert "named the fix" in launch("tables_alone.py", 3, others)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_state_is_loaded_on_all_ranks_or_none(launch, what):
    assert "named the fix" in launch("tables_load.py", 3, what)


def test_a_file_that_rank_0_cannot_write_is_everybodys_error(launch, tmp_path):
    launch("tables_save.py", 3, tmp_path)


def test_bad_ids_and_ranks_that_disagree_are_named(launch):
    launch("tables_bad.py", 2)


def test_rules_that_differ_between_ranks_are_named(launch):
    launch("tables_rules.py", 2)


def test_no_rank_draws_the_whole_table(launch):
    launch("tables_memory.py", 2)


def test_norms_that_differ_between_ranks_are_named(launch):
    launch("tables_norm.py", 2)


def test_memory_of_an_interrupted_lookup_stays(launch):
    launch("tables_interrupted.py", 2)


# ---- one process ----


def trained(make, sharded, dtype=torch.float64, steps=10):
    """Of a table alone: its values after some steps; each reads some rows, one of them several times."""
    torch.manual_seed(1)
    layer = torch.nn.Embedding(20, 5, padding_idx=2, sparse=not sharded, dtype=dtype)
    if sharded:
        layer = weft.nn.Embedding.from_embedding(layer)
    optimizer = make(layer.parameters())
    if sharded:
        optimizer = weft.optim.hybrid(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(steps):
            optimizer.zero_grad()
            ids = torch.tensor([[step % 20, 3], [3, (7 * step) % 20]])
            (layer(ids) ** 2 + layer(ids)).sum().backward()
            optimizer.step()
            scheduler.step()
    return layer.state_dict()["weight"]


def test_lazy_adam_is_sparse_adam_where_it_puts_eps_too():
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        options = {"lr": 0.1, "eps": 0.1, "betas": (0.8, 0.95)}
        expected = trained(lambda p: torch.optim.SparseAdam(p, **options), False, dtype)
        for kind in (torch.optim.SparseAdam, torch.optim.Adam):
            mine = trained(lambda p, kind=kind: kind(p, **options), True, dtype)
            assert torch.allclose(mine, expected, rtol=0, atol=tolerance), (kind, (mine - expected).abs().max())
        # Control: torch's Adam adds eps to the corrected root, and moves rows without a gradient.
        torch.manual_seed(1)
        dense = torch.nn.Embedding(20, 5, padding_idx=2, dtype=dtype)
        optimizer = torch.optim.Adam(dense.parameters(), **options)
        dense(torch.tensor([0, 3])).sum().backward()
        optimizer.step()
        one = trained(lambda p: torch.optim.SparseAdam(p, **options), False, dtype, steps=1)
        assert not torch.allclose(dense.weight, one, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3, eps=0.01),
    ],
)
def test_sgd_and_adagrad_are_torchs(make):
    expected = trained(make, False)
    assert torch.allclose(trained(make, True), expected, rtol=0, atol=1e-14)
    assert not torch.allclose(trained(make, True, steps=9), expected, rtol=0, atol=1e-3), "control"


def test_groups_have_rules_of_their_own():
    """Two tables of one optimizer with other options, and a third with another optimizer; schedulers on the inner ones."""

    def train(sharded):
        torch.manual_seed(2)
        layers = [torch.nn.Embedding(12, 3, sparse=not sharded, dtype=torch.float64) for _ in range(3)]
        if sharded:
            layers = [weft.nn.Embedding.from_embedding(layer, f"layer{i}") for i, layer in enumerate(layers)]
        groups = [{"params": [layers[0].weight], "lr": 0.1}, {"params": [layers[1].weight], "lr": 0.3, "eps": 0.2, "betas": (0.5, 0.9)}]
        inner = [torch.optim.SparseAdam(groups), torch.optim.SGD(layers[2].parameters(), lr=0.2)]
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner[0], [lambda step: 0.9**step, lambda step: 1 / (1 + step)])
        optimizers = [weft.optim.hybrid(each) for each in inner] if sharded else inner
        ids = [torch.tensor([step % 12, 5, (5 * step) % 12]) for step in range(8)]
        batches = weft.lookahead(ids, ids={layer: lambda batch: batch for layer in layers}) if sharded else ids
        for batch in batches:
            for each in optimizers:
                each.zero_grad()
            sum(((i + 1) * layer(batch).sin()).sum() for i, layer in enumerate(layers)).backward()
            for each in optimizers:
                each.step()
            scheduler.step()
        return [layer.state_dict()["weight"] for layer in layers]

    expected = train(False)
    for mine, theirs in zip(train(True), expected):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-14), (mine - theirs).abs().max()
    assert not torch.allclose(expected[0], expected[1], rtol=0, atol=1e-2), "control: the groups differ"


def test_initial_values_are_torchs(monkeypatch):
    torch.manual_seed(3)
    expected = torch.nn.Embedding(10, 4, padding_idx=-9)
    after = torch.rand(1)
    torch.manual_seed(3)
    mine = weft.nn.Embedding(10, 4, padding_idx=-9)
    assert torch.equal(torch.rand(1), after), "what is drawn next is the same, too"
    assert torch.equal(mine.state_dict()["weight"], expected.weight) and mine.padding_idx == expected.padding_idx == 1
    # Drawn in pieces, whose lengths and remainders say nothing to the bits.
    for rows, columns, piece, dtype in [(1003, 7, 700, torch.float32), (33, 1, 1, torch.float32), (500, 5, 99, torch.float64), (3, 2, 1, torch.float32)]:
        monkeypatch.setattr("weft._columns._CHUNK", piece)
        torch.manual_seed(4)
        whole = torch.nn.Embedding(rows, columns, padding_idx=2, dtype=dtype).weight
        after = torch.rand(1)
        torch.manual_seed(4)
        pieces = weft.nn.Embedding(rows, columns, padding_idx=2, dtype=dtype).state_dict()["weight"]
        assert torch.equal(pieces, whole) and torch.equal(torch.rand(1), after), (rows, columns)
    torch.manual_seed(4)
    whole = torch.empty(50).normal_()
    torch.manual_seed(4)
    assert not torch.equal(torch.cat([torch.empty(n).normal_() for n in (20, 30)]), whole), "control: not every cut keeps the bits"
    values = torch.randn(6, 3)
    frozen = weft.nn.Embedding.from_pretrained(values)
    ids = torch.tensor([[1, 5], [5, 0]])
    assert torch.equal(frozen(ids), values[ids]) and not frozen(ids).requires_grad
    learns = weft.nn.Embedding.from_pretrained(values, freeze=False)
    assert torch.equal(learns(ids), values[ids]) and learns(ids).requires_grad
    expected.load_state_dict(mine.state_dict())
    mine.load_state_dict({"weight": torch.ones(10, 4)})
    assert mine(torch.tensor(3)).eq(1).all() and mine(torch.empty(0, dtype=torch.int64)).shape == (0, 4)
    with pytest.raises(RuntimeError, match="whole table"):
        mine.load_state_dict({"weight": torch.ones(4, 10)})


def test_the_learning_rate_is_that_of_the_groups_after_loading_too():
    layer = weft.nn.Embedding(6, 2)
    optimizer = weft.optim.hybrid(torch.optim.SGD(layer.parameters(), lr=0.5))
    for lr in (0.0, 0.5):
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = lr
        before = layer.state_dict()["weight"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer(torch.tensor([1, 1])).sum().backward()
        optimizer.step()
        before[1] -= 2 * lr
        assert torch.equal(layer.state_dict()["weight"], before), lr


@pytest.mark.parametrize(
    "kind, option, values",
    [
        (torch.optim.Adam, "betas", [(0.9, 0.999), (0.5, 0.9)]),
        (torch.optim.SparseAdam, "eps", [1e-8, 0.5]),
        (torch.optim.AdamW, "weight_decay", [0.01, 0.5]),
        (torch.optim.Adagrad, "lr_decay", [0.0, 0.5]),
    ],
)
def test_options_of_the_groups_hold_from_the_next_step_on(kind, option, values):
    """Set in a group or by load_state_dict(), they are as if they had been given at once; the other group keeps its own."""

    def train(given, change=None):
        torch.manual_seed(4)
        layers = [weft.nn.Embedding(6, 2, dtype=torch.float64, name=f"{option}{i}") for i in range(2)]
        groups = [{"params": layer.parameters(), option: given} for layer in layers]
        optimizer = weft.optim.hybrid(kind(groups, lr=0.1))
        if change is not None:
            change(optimizer)
        loader = [torch.tensor(ids) for ids in ([1, 2], [2, 3], [1, 4])]
        for batch in weft.lookahead(loader, ids={layer: lambda x: x for layer in layers}):
            optimizer.zero_grad()
            sum(layer(batch).sin().sum() for layer in layers).backward()
            optimizer.step()
        return [layer.state_dict()["weight"] for layer in layers]

    def load(optimizer):
        state = optimizer.state_dict()
        state["param_groups"][0][option] = values[1]
        optimizer.load_state_dict(state)

    before, after = train(values[0]), train(values[1])
    for change in (lambda optimizer: optimizer.param_groups[0].update({option: values[1]}), load):
        changed = train(values[0], change)
        assert torch.equal(changed[0], after[0]) and torch.equal(changed[1], before[1])
    assert not torch.allclose(before[0], after[0], rtol=0, atol=1e-3), "control"


@pytest.mark.parametrize(
    "kind, option, value",
    [(torch.optim.SGD, "momentum", 0.9), (torch.optim.Adam, "amsgrad", True), (torch.optim.Adam, "decoupled_weight_decay", True)],
)
def test_options_that_no_rule_has_are_refused_in_a_later_step_too(kind, option, value):
    layer = weft.nn.Embedding(6, 2)
    optimizer = weft.optim.hybrid(kind(layer.parameters(), lr=0.5))
    ids = torch.tensor([1])
    before = optimizer.param_groups[0][option]
    for batch in weft.lookahead([ids, ids], ids={layer: lambda x: x}):
        layer(batch).sum().backward()
        optimizer.param_groups[0][option] = value
        refused(optimizer.step, option)
        optimizer.param_groups[0][option] = before
        optimizer.step()  # nothing of it was lost


@pytest.mark.filterwarnings("ignore:table")
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("how", ["none", "zero", "loop", "kept"])
def test_zero_grad_of_a_module_drops_gradients_of_rows(ahead, how):
    """Of the tables in it: what another module's backward has left stays."""
    layers = [weft.nn.Embedding.from_pretrained(torch.zeros(6, 2), freeze=False) for _ in range(2)]
    models = [torch.nn.Sequential(layer, torch.nn.Linear(2, 1)) for layer in layers]
    optimizer = weft.optim.hybrid(torch.optim.SGD([p for model in models for p in model.parameters()], lr=1.0))
    ids = torch.tensor([1, 2])
    for batch in weft.lookahead([ids], ids={layer: lambda x: x for layer in layers}) if ahead else [ids]:
        assert layers[0].weight.grad is None
        sum(layer(batch[:1]).sum() for layer in layers).backward()
        assert layers[0].weight.grad is not None
        assert torch.nn.utils.clip_grad_norm_(layers[0].parameters(), 1.0, norm_type=float("inf")) == 0, "torch's own function sees nothing"
        if how == "loop":
            for p in models[0].parameters():
                p.grad = None
        elif how != "kept":
            models[0].zero_grad(set_to_none=how == "none")
        assert (layers[0].weight.grad is None) == (how != "kept")
        sum(layer(batch[1:]).sum() for layer in layers).backward()
        refused(lambda: setattr(layers[0].weight, "grad", torch.zeros(6, 2)), "clip_grad_norm_")
        optimizer.step()
    assert layers[0].weight.grad is None
    moved = [layer.state_dict()["weight"][:, 0].tolist() for layer in layers]
    both = [0, -1, -1, 0, 0, 0]
    assert moved == [both if how == "kept" else [0, 0, -1, 0, 0, 0], both]


@pytest.mark.filterwarnings("ignore:table")
@pytest.mark.parametrize("where", ["table", "dense", "nowhere"])
def test_a_norm_that_is_not_finite_is_returned_or_raised(where):
    layer, linear = weft.nn.Embedding.from_pretrained(torch.ones(5, 2), freeze=False), torch.nn.Linear(2, 1)
    parameters = [*layer.parameters(), *linear.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = weft.optim.hybrid(torch.optim.SGD(parameters, lr=1.0), clips=True, scaler=scaler)
    for raises in (False, True):
        optimizer.zero_grad()
        loss = linear(layer(torch.tensor([1]))).sum()
        if where == "table":
            loss = loss + (layer(torch.tensor([2])) * float("inf")).sum()
        if where == "dense":
            loss = loss + (linear.bias * float("inf")).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        before = layer.state_dict()["weight"]

        def clip(raises=raises):
            return weft.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=raises)

        if raises and where != "nowhere":
            refused(clip, "not finite", kind=RuntimeError)
        else:
            assert torch.isfinite(clip()) == (where == "nowhere")
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layer.state_dict()["weight"], before) == (where != "nowhere")


class Every(torch.nn.Module):
    """One embedding of each kind."""

    def __init__(self):
        super().__init__()

        class Derived(torch.nn.Embedding):
            pass

        self.plain = torch.nn.Embedding(9, 4)
        self.again = self.plain
        self.tied = torch.nn.Embedding(9, 4)
        self.head = torch.nn.Linear(4, 9, bias=False)
        self.head.weight = self.tied.weight
        self.frozen = torch.nn.Embedding(9, 4).requires_grad_(False)
        self.derived = Derived(9, 4)
        self.limited = torch.nn.Embedding(9, 4, max_norm=1.0)
        self.counted = torch.nn.Embedding(9, 4, scale_grad_by_freq=True)
        self.short = torch.nn.Embedding(9, 4, dtype=torch.bfloat16)
        self.inner = torch.nn.Sequential(torch.nn.Embedding(5, 3, padding_idx=1, sparse=True), torch.nn.ReLU())


def test_what_is_swapped_and_why_not():
    model = Every()
    values = model.plain.weight.detach().clone()
    done = weft.shard_embeddings(model)
    assert [name for name, each in done.items() if each.sharded] == ["plain", "again", "inner.0"]
    assert model.plain is model.again and isinstance(model.inner[0], weft.nn.Embedding) and model.inner[0].padding_idx == 1
    assert torch.equal(model.plain(torch.arange(9)), values)
    words = {"tied": "head.weight", "frozen": "frozen", "derived": "Derived", "limited": "max_norm"}
    words |= {"counted": "scale_grad_by_freq", "short": "bfloat16"}
    for name, word in words.items():
        assert not done[name].sharded and word in done[name].why, done[name]
        assert isinstance(getattr(model, name), torch.nn.Embedding)
    assert "rank 0 of 1 holds columns 0 to 3 of 4" in done["plain"].why
    ignored = model._ddp_params_and_buffers_to_ignore
    assert ignored == ["plain.weight", "inner.0.weight"] and model.inner._ddp_params_and_buffers_to_ignore == ["0.weight"]
    assert weft.shard_embeddings(model)["plain"].sharded, "a second time changes nothing"
    names = [name for name, _ in weft.DataParallel(model, scheme="dense", find_unused=False).module.named_parameters()]
    assert "plain.weight" in names


def refused(call, *words, kind=weft.UsageError):
    with pytest.raises(kind) as caught:
        call()
    said = str(caught.value)
    assert all(word in said for word in words) and "\n" not in said, said


def test_refusals_are_one_sentence():
    refused(lambda: weft.nn.Embedding(5, 3, max_norm=1.0), "max_norm")
    refused(lambda: weft.nn.Embedding(5, 3, scale_grad_by_freq=True), "scale_grad_by_freq")
    refused(lambda: weft.nn.Embedding(5, 3, padding_idx=5), "padding_idx 5")
    refused(lambda: weft.nn.Embedding(5, 3, dtype=torch.float16), "float16")
    layer = weft.nn.Embedding(5, 3, name="mine")
    for make, word in [
        (lambda p: torch.optim.RMSprop(p), "RMSprop"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight decay"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "maximize"),
    ]:
        refused(lambda make=make: weft.optim.hybrid(make(layer.parameters())), word)
    refused(lambda: layer(torch.tensor([0.5])), "float32")
    refused(lambda: layer(torch.tensor([4, 5])), "rank 0", "id 5", "'mine'", "0 to 4")
    refused(lambda: layer.half(), "'mine'", "float16")
    refused(lambda: copy.deepcopy(layer), "load_state_dict")
    refused(lambda: layer(torch.tensor([1])).sum().backward(), "weft.optim.hybrid")
    refused(lambda: list(weft.lookahead([], ids={"mine": "x"})), "table 'mine' has no optimizer", "weft.optim.hybrid(optimizer) comes before")
    optimizer = weft.optim.hybrid(torch.optim.SGD(layer.parameters(), lr=0.1))
    refused(lambda: weft.optim.hybrid(optimizer), "already")
    refused(lambda: weft.optim.hybrid(torch.optim.SGD(layer.parameters(), lr=0.1)), "already")
    refused(lambda: list(weft.lookahead([], ids={"other": "x"})), "'other'", "mine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer(torch.tensor([1])).sum().backward()
    refused(lambda: weft.clip_grad_norm_(layer, 1.0), "clips=True")
    refused(lambda: weft.clip_grad_norm_(layer.parameters(), 1.0, norm_type=1), "type 2")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    refused(lambda: scaler.step(optimizer), "scaler=scaler")


def test_lookahead_says_what_is_missing():
    model = Model(5)
    weft.shard_embeddings(model)
    optimizer = weft.optim.hybrid(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = [batch_of(step, 0, 1) for step in range(3)]
    refused(lambda: list(weft.lookahead(loader, ids={"inp": "a"}, model=model)), "'out'")

    def without_step():
        for batch in weft.lookahead(loader, ids=IDS, model=model):
            model(batch).backward()

    def not_announced():
        for batch in weft.lookahead(loader, ids={"inp": "a", "out": "b"}, model=model):
            model({"a": batch["a"], "b": (batch["b"] + 1) % 45})

    for call, words in [(without_step, ["optimizer.step()", "accumulate=n"]), (not_announced, ["is not among those", "'out'", "model.eval()"])]:
        refused(call, *words)
        optimizer.step()
    # What was left in the middle of a loop does not keep a later one from its rows.
    for batch in weft.lookahead(loader, ids=IDS, model=model):
        before = model.state_dict()["inp.weight"]
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        assert not torch.equal(model.state_dict()["inp.weight"], before)
        break
    for batch in weft.lookahead(loader, ids=IDS, model=model):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
