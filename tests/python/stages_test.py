"""Stages of a list of modules: equal to one process on every layout and schedule, state, clipping, what is refused."""


def test_equals_one_process_on_every_layout_and_goes_on_at_another_size(launch, tmp_path):
    """And what is refused, and what is said."""
    path = tmp_path / "state.pt"
    said = launch("stages.py", 4, path)
    assert said.count("named the module") == 4
    dropped = "had left behind is dropped: it is of stages pp=2,tp=1 over 2 ranks each, here "
    assert said.count(dropped + "pp=4,tp=1 over 1 rank") == said.count(dropped) == 1, said
    assert launch("stages.py", 2, path).count(dropped + "pp=2,tp=1 over 1 rank") == 1


def test_what_fails_on_one_rank_is_raised_on_all_of_them(launch):
    launch("stage_fails.py", 4, launcher="torchrun")


def test_what_passes_is_what_training_computes_and_modules_are_compiled_once(launch):
    said = launch("stage_passes.py", 2)
    for stage in (0, 1):  # of the modules that torch knows to be compiled
        assert said.count(f"stage {stage}: 2 layers torch.nn.Linear are in compiled modules") == 2, said
