"""Stages of a list of modules: equal to one process on every layout and schedule, state, clipping, what is refused."""


def test_equals_one_process_on_every_layout_and_goes_on_at_another_size(launch, tmp_path):
    """And what is refused, and what is said."""
    path = tmp_path / "state.pt"
    assert launch("stages.py", 4, path).count("named the module") == 4
    launch("stages.py", 2, path)
