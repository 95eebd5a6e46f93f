"""Stages of a list of modules: equal to one process on every layout and schedule, state, clipping, what is refused."""


def test_equals_one_process_on_every_layout_and_goes_on_at_another_size(launch, tmp_path):
    """And what is refused, and what is said."""
    path = tmp_path / "state.pt"
    said = launch("stages.py", 4, path)
    assert said.count("named the module") == 4
    dropped = "had left behind is dropped: it is of stages pp=2,tp=1 over 2 ranks each, here "
    assert said.count(dropped + "pp=4,tp=1 over 1 rank") == said.count(dropped) == 1, said
    assert launch("stages.py", 2, path).count(dropped + "pp=2,tp=1 over 1 rank") == 1
