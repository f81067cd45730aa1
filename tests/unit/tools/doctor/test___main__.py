"""What the doctor says of what the processes of a cluster have told it."""

import pytest

from phalanx._src.tools.doctor import __main__ as checkup

SAME = {"jax": "0.10.2", "python": "3.11.7"}


def test_all_is_well():
    """Equal versions, clocks, sums, and a folder that all see."""
    checks = [
        checkup.judge_versions([SAME, dict(SAME)]),
        checkup.judge_clocks([100.0, 104.0], 0.1),
        checkup.judge_clocks([100.0, 107.0], 3.0),
        checkup.judge_shared("/shared", [[0, 1], [0, 1]]),
        checkup.judge_sum(4.0, 4, 0.001),
    ]
    assert [str(check)[:5] for check in checks] == ["PASS "] * 5


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (
            checkup.judge_versions([SAME, {**SAME, "jax": "0.11.0"}]),
            "FAIL versions: jax differs: rank 0 has 0.10.2, rank 1 has 0.11.0.\nHINT: pip install jax==0.10.2 on all workers",
        ),
        (
            checkup.judge_versions([SAME, {"jax": "0.10.2"}]),
            "FAIL versions: python differs: rank 0 has 3.11.7, rank 1 has none.\nHINT: ",
        ),
        (
            checkup.judge_clocks([100.0, 160.0, 101.0], 0.1),
            "FAIL clocks: the clock of rank 1 is 60 s ahead of the clock of rank 0.\nHINT: synchronize the clocks",
        ),
        (
            checkup.judge_shared("/shared", [[0, 1, 2], [0, 1, 2], [0, 2]]),
            "FAIL shared folder: rank 2 does not see the file that rank 1 wrote to /shared.\nHINT: use a folder on a file system",
        ),
        (
            checkup.judge_sum(1.0, 2, 0.001),
            "FAIL all-reduce: the sum of ones over 2 replicas is 1.\nHINT: report a bug, with the output of phalanx env --json",
        ),
        (
            checkup.judge_failure(RuntimeError("gloo: connection timed out\n  at tcp/pair.cc")),
            "FAIL all-reduce: gloo: connection timed out\nHINT: let the machines reach each other at all TCP ports",
        ),
    ],
    ids=["versions", "missing package", "clocks", "shared folder", "sum", "no connection"],
)
def test_what_fails_is_named(check, said):
    assert str(check).startswith(said)


def test_files_of_others_in_the_shared_folder(tmp_path):
    """They may have the token, which the names of the files have."""
    for end in ("x", "", "9" * 100):
        (tmp_path / f".phalanx-doctor-abc-{end}").touch()
    check = checkup._shared_folder(str(tmp_path), "abc", 0, lambda message: [message])
    assert check.is_passed


def test_folder_that_another_rank_cannot_write_to(tmp_path):
    """The file of this rank does not stay there."""
    check = checkup._shared_folder(str(tmp_path), "abc", 0, lambda message: [message, "rank 1 cannot write."])
    assert (check.is_passed, check.finding) == (False, "rank 1 cannot write.")
    assert not list(tmp_path.iterdir())
