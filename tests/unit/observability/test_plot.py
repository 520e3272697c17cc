from pathlib import Path

from joynexus.observability.plot import GroupMark, group_marks, plot_run

RECORDS = [
    {"step": step, "time_s": 100.0 + step, "training/loss": 1.0 / step, "training/group_tenants": 1 + step % 3}
    for step in range(1, 20)
]


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_marks_are_the_calls_that_were_part_of_a_group():
    records = [*RECORDS[:2], {"step": 3, "time_s": 5.0, "rollout/return_mean": 1.0}]
    assert group_marks(records) == [
        GroupMark(time_s=101.0, num_tenants=2, num_samples=0),
        GroupMark(time_s=102.0, num_tenants=3, num_samples=0),
    ]


def test_a_run_is_one_picture(tmp_path):
    rollout = [{"step": step, "time_s": 100.0, "rollout/success_once": 0.5, "training/kl": None} for step in (5, 10)]
    groups = {"training": [GroupMark(time_s=101.0, num_tenants=12, num_samples=64)], "inference": []}
    seconds = {"alice": {"prefix": 2.0, "backward": 1.0}, "bob": {"backward": 0.5}}
    plot_run(tmp_path / "plots/run.png", {"alice": RECORDS, "bob": rollout, "carol": []}, groups, seconds)
    assert is_png(tmp_path / "plots/run.png")


def test_a_run_of_which_nothing_is_known_is_still_a_picture(tmp_path):
    plot_run(tmp_path / "empty.png", {})
    assert is_png(tmp_path / "empty.png")


def test_losses_below_zero_are_drawn(tmp_path):
    plot_run(tmp_path / "negative.png", {"alice": [{"step": 1, "time_s": 0.0, "training/loss": -1.0}]})
    assert is_png(tmp_path / "negative.png")
