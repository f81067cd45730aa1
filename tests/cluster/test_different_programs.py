"""Workers whose programs, shapes or dtypes differ: all of them learn which ranks differ, and can go on."""

import pytest

SAID = {
    "mean of shapes": "argument 0 is float32[1] per replica on rank 0 and float32[2] per replica on rank 1",
    "gather of shapes": "argument 0 is float32[1] per replica on rank 0 and float32[2] per replica on rank 1",
    "dtypes": "argument 0 is float32[9] per replica on rank 0 and int32[9] per replica on rank 1",
    "models": "variable 0 is float32[4,3] on rank 0 and float32[4,4] on rank 1 ('sequential",
    "layouts": "float32[4,4] with the layout (None, 'model') on rank 0 and float32[4,4] with the layout ('model',) on rank 1",
    "operations": "cos of float32[3] on rank 0 and sin of float32[3] on rank 1",
}


@pytest.mark.cover(["case"], {"mean of shapes", "models", "layouts", "operations"})
@pytest.mark.parametrize("case", SAID)
def test_ranks_that_differ_are_named(cluster_of, case):
    """Nobody gets a wrong number, and no process is aborted."""
    cluster = cluster_of(2, 1)
    for text in cluster.call("differing", case=case):
        assert text.startswith("TraceError: the program that ")
        assert "tasks.py:" in text
        assert " runs: all processes must run the same program, but " in text
        assert SAID[case] in text
        assert "\nHINT: " in text
    assert cluster.call("differing", case="late") == [22.0, 22.0]


def test_meshes_that_differ(cluster_of):
    """They are noticed when the strategy is created: an exchange between them would abort the processes."""
    cluster = cluster_of(2, 1)
    for text in cluster.call("differing", case="meshes"):
        assert text.startswith("TraceError: a strategy with the mesh {'replica': ")
        assert "the mesh is {'replica': 2} on rank 0 and {'replica': 1, 'model': 2} on rank 1.\nHINT: " in text
    assert cluster.call("differing", case="late") == [22.0, 22.0]


@pytest.mark.parametrize(
    ("case", "results"), [("constants", [4.0, 4.0]), ("one worker alone", [None, [2.0, 2.0]]), ("late", [22.0, 22.0])]
)
def test_what_may_differ(cluster_of, case, results):
    """Constants may differ, a program without communication is nobody else's business, and a worker may be late."""
    assert cluster_of(2, 1).call("differing", case=case) == results
