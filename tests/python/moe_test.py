"""Layers of experts: equal to one process on every layout, state, clipping, DDP, what is refused."""


def test_equals_one_process_on_every_layout_and_goes_on_at_another_size(launch, tmp_path):
    """And what is refused, and what is said."""
    path = tmp_path / "state.pt"
    assert launch("moe.py", 4, path).count("named the gate") == 4
    for size in (1, 2):
        launch("moe.py", size, path)


def test_beside_ddp_with_a_scaler_and_clipping(launch):
    launch("moe_ddp.py", 2, launcher="torchrun")


def test_a_state_dict_on_one_rank_names_the_fix(launch):
    assert "named the fix" in launch("moe_alone.py", 2)
